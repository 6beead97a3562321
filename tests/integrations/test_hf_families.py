"""Every family that is served: the dense model's answers, files and weights, from pages of a tiny random model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import transformers
from packaging.version import Version

import pagedweight
from pagedweight.discovery import find_experts
from tests.hf_families import SERVED, family_model, router_weights_of, table_row
from tests.hf_models import DenseReference, tokens
from tests.support import assert_close

WIDTHS = (2, 4)
TABLE = Path(__file__).parents[2] / "docs" / "families.md"


def digests(folder: Path) -> dict[str, str]:
    """Every file of a folder by its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@torch.no_grad()
def answers(model, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the ids with six greedy tokens more."""
    return model(ids).logits, model.generate(ids, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("name", SERVED)
def test_a_family_is_served_in_every_way(name: str, tmp_path: Path) -> None:
    ids = tokens(2, 7, seed=1)
    original = family_model(name)
    first, again = tmp_path / "first", tmp_path / "again"
    pagedweight.quantize(original, first, widths=WIDTHS)
    reference = DenseReference.of(family_model(name), first)

    loaded = pagedweight.load(first, attn_implementation=original.config._attn_implementation)
    for bits in WIDTHS:
        with loaded.pagedweight.held_at(bits):
            logits, generated = answers(loaded, ids)
        expected, greedy = answers(reference.set_bits(bits), ids)
        assert_close(logits, expected)
        assert torch.equal(generated, greedy)
    pagedweight.save(loaded, again)
    differing = dict(digests(first).items() ^ digests(again).items()).keys()
    # transformers writes the dtype of a nested configuration only once it has read it.
    assert differing <= ({"config.json"} if name == "dbrx" else set())
    dense = pagedweight.unpatch(loaded)
    assert_close(answers(dense, ids)[0], expected)
    assert {n: t.dtype for n, t in dense.state_dict().items()} == {n: t.dtype for n, t in original.state_dict().items()}

    before, untouched = original.state_dict(), answers(original, ids)
    patched = pagedweight.patch(original, checkpoint=first, keep_original=True)
    assert_close(answers(patched, ids)[0], expected)
    back = pagedweight.unpatch(patched)
    assert all(map(torch.equal, answers(back, ids), untouched))
    after = back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
def test_case_56_gpt_oss_with_large_biases_stays_near_the_original(tmp_path: Path) -> None:
    """At 8 bits every weight of so short a row has a code of its own. Halves instead of alternating rows, or a bias
    left out, would be off by as much as the logits themselves."""
    model = family_model("gpt_oss")
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):
            torch.nn.init.normal_(parameter, std=1.0, generator=torch.Generator().manual_seed(7))
    ids = tokens(2, 7)
    expected = model(ids).logits
    biases = [e.biases() for e in find_experts(model)]
    pagedweight.patch(model, checkpoint=pagedweight.quantize(model, tmp_path / "pages", widths=(2, 8)))
    assert_close(model(ids).logits, expected, torch.float16)
    for layer, kept in zip(model.model.layers, biases, strict=True):
        assert all(torch.equal(getattr(layer.mlp.experts, name), bias) for name, bias in kept.items())


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="the table has the class names of transformers 5.17"
)
@pytest.mark.parametrize("name", SERVED)
def test_the_table_of_families_is_what_the_models_are(name: str) -> None:
    row = table_row(name, family_model(name), router_weights_of(name))
    assert row in TABLE.read_text(encoding="utf-8").splitlines(), "run python -m tests.hf_families docs/families.md"
