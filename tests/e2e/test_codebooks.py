"""Every codebook from quantize() to the answers of a patched model, its pages, and back to a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import PreTrainedModel

import pagedweight
from pagedweight.bitplane import codebook_of
from pagedweight.checkpoint import Checkpoint
from tests.hf_models import DenseReference, mixtral_m8, tokens
from tests.support import assert_close

WIDTHS = (2, 3, 4, 5, 6)
MAPPINGS = {
    "lut8-cubic": {2: "lut8", 3: "lut8", 4: "lut8", 5: "cubic", 6: "cubic"},
    "lut8-affine": {2: "lut8", 3: "lut8", 4: "lut8", 5: "affine", 6: "affine"},
    "mixed": {3: "cubic", 4: "lut8", 5: "affine"},  # lut16 at the others
}
IDS = tokens(2, 9)


def small() -> PreTrainedModel:
    return mixtral_m8(num_local_experts=3, intermediate_size=40)


@pytest.fixture(scope="module", params=MAPPINGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pagedweight.quantize(small(), tmp_path_factory.mktemp("folder"), codebooks=MAPPINGS[request.param])


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


def test_answers_are_those_of_dense_weights_rebuilt_from_the_same_codes(folder: Path) -> None:
    patched, reference = pagedweight.load(folder), DenseReference.of(small(), folder)
    rows = patched.pagedweight.layout.rows
    mixed = [np.random.default_rng(seed).choice(WIDTHS, rows) for seed in range(2)]
    for bits in (*WIDTHS, *reversed(WIDTHS), *mixed):
        patched.pagedweight.set_bits(bits)
        assert_close(logits(patched), logits(reference.set_bits(bits)))
        patched.pagedweight.check()


def test_pages_hold_tables_in_their_own_form(folder: Path) -> None:
    opened, patched = Checkpoint.open(folder), pagedweight.load(folder)
    paged = patched.pagedweight
    assert dict(paged.layout.codebooks) == dict(opened.layout.codebooks)
    for block, packed in paged.store.blocks():
        stored = opened.block(block)
        assert torch.equal(packed.planes, stored.planes)
        for bits in WIDTHS:
            assert codebook_of(packed.tables[bits], bits) == paged.layout.codebooks[bits]
            assert packed.tables[bits].equal(stored.tables[bits])


def test_the_parent_width_takes_the_bytes_of_its_own_tables(folder: Path) -> None:
    paged = pagedweight.load(folder).pagedweight
    widened = pagedweight.patch(small()).pagedweight
    assert paged.arena.memory.numel() == paged.store.sizes.resident_bytes()[:, -1].sum()
    held, wide = paged.store.sizes.resident_bytes(), widened.store.sizes.resident_bytes()
    assert (held <= wide).all()
    if paged.layout.codebooks[6] != "lut16":
        assert held[:, -1].sum() < wide[:, -1].sum()
    assert (np.diff(held, axis=1) > 0).all()


def test_a_saved_folder_loads_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    patched = pagedweight.load(folder)
    pagedweight.save(patched, tmp_path)
    first, second = Checkpoint.open(folder), Checkpoint.open(tmp_path)
    assert dict(first.layout.codebooks) == dict(second.layout.codebooks)
    for block in first.layout.blocks():
        mine, other = first.block(block), second.block(block)
        assert torch.equal(mine.planes, other.planes)
        assert all(torch.equal(mine.tables[bits], other.tables[bits]) for bits in WIDTHS)
    assert torch.equal(logits(pagedweight.load(tmp_path)), logits(patched))


def test_unpatching_gives_the_parent_width(folder: Path) -> None:
    patched = pagedweight.patch(small(), checkpoint=folder)
    pagedweight.unpatch(patched)
    assert torch.equal(logits(patched), logits(DenseReference.of(small(), folder).set_bits(6)))


@pytest.mark.parametrize(
    ("codebooks", "says"),
    [
        ({5: "lut8"}, "lut8 at 5 bits"),
        ({2: "cubic"}, "cubic at 2 bits"),
        ({3: "lut4"}, "known codebook"),
        ({7: "affine"}, "widths \\[7\\]"),
    ],
)
def test_a_codebook_that_cannot_serve_is_refused_before_anything_is_written(codebooks, says, tmp_path) -> None:
    with pytest.raises(ValueError, match=says):
        pagedweight.quantize(small(), tmp_path / "out", codebooks=codebooks)
    assert not (tmp_path / "out").exists()
