"""Folders written by quantize() and save() load to the same answers, here and in another process, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.checkpoint import Checkpoint, CheckpointError
from pagedweight.integrations import hf_quantizer
from pagedweight.policy import Policy
from tests.hf_models import FAMILIES, gemma4_g16, mixtral_m8, quantized_folder, tokens

IDS = tokens(2, 9)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model's own folder, to be damaged."""
    return pagedweight.quantize(mixtral_m8(num_local_experts=2, intermediate_size=32), tmp_path / "small")


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_gives_what_patching_gives(family: str) -> None:
    patched = pagedweight.patch(FAMILIES[family](), checkpoint=quantized_folder(family))
    loaded = pagedweight.from_pretrained(quantized_folder(family))
    assert torch.equal(logits(loaded), logits(patched))
    assert type(loaded) is type(patched)
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    assert not hasattr(loaded.config, "quantization_config")


def test_a_bare_patch_gives_what_quantize_and_load_give() -> None:
    assert torch.equal(logits(pagedweight.patch(mixtral_m8())), logits(pagedweight.load(quantized_folder("M8"))))


def test_quantize_leaves_the_model_alone(tmp_path: Path) -> None:
    model = mixtral_m8(num_local_experts=2, intermediate_size=32)
    before, config = logits(model), model.config.to_dict()
    pagedweight.quantize(model, tmp_path)
    assert torch.equal(logits(model), before)
    assert "quantization_config" not in model.config.to_dict()
    assert model.config.to_dict().keys() >= config.keys()


def test_case_107_tied_embeddings_are_kept_once_and_tied(tmp_path: Path) -> None:
    patched = pagedweight.patch(gemma4_g16(), checkpoint=quantized_folder("G16"))
    pagedweight.save(patched, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert [name for name in names if "embed_tokens" in name or "lm_head" in name] == ["model.embed_tokens.weight"]
    loaded = pagedweight.load(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits(loaded), logits(patched))


LOAD_ELSEWHERE = """
import sys, numpy, torch, pagedweight
from safetensors.torch import load_file, save_file
folder, seen = sys.argv[1:]
seen = load_file(seen)
torch.set_num_threads(1)
model = pagedweight.load(folder)
model.pagedweight.set_bits(seen["bits"].numpy())
with torch.no_grad():
    assert torch.equal(model(seen["ids"]).logits, seen["mixed"])
    model.pagedweight.set_bits(6)
    assert torch.equal(model(seen["ids"]).logits, seen["parent"])
assert model.generate(seen["ids"], max_new_tokens=2, do_sample=False).shape == (2, 11)
"""


def test_case_110_and_119_saved_at_mixed_widths_and_loaded_in_another_process(tmp_path: Path) -> None:
    """The file holds all planes, also those that were on the host; the other process has no Triton interpreter."""
    model = pagedweight.patch(mixtral_m8(), checkpoint=quantized_folder("M8"))
    parent = logits(model)
    bits = np.where(np.arange(model.pagedweight.layout.rows) % 2, 6, 3)
    model.pagedweight.set_bits(bits)
    pagedweight.save(model, tmp_path / "saved")
    seen = {"bits": torch.from_numpy(bits), "ids": IDS, "mixed": logits(model), "parent": parent}
    save_file(seen, tmp_path / "seen.safetensors")
    command = [sys.executable, "-c", LOAD_ELSEWHERE, tmp_path / "saved", tmp_path / "seen.safetensors"]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[2], env={"OMP_NUM_THREADS": "1"})


def test_saving_again_writes_the_same_pages(tmp_path: Path) -> None:
    pagedweight.save(pagedweight.load(quantized_folder("M8")), tmp_path)
    first, second = (Checkpoint.open(path) for path in (quantized_folder("M8"), tmp_path))
    for block in first.layout.blocks():
        mine, other = first.block(block), second.block(block)
        assert torch.equal(mine.planes, other.planes)
        assert all(torch.equal(mine.tables[bits], other.tables[bits]) for bits in first.layout.widths)


def flip_a_byte(pages: Path) -> None:
    content = bytearray(pages.read_bytes())
    content[-5] ^= 1
    pages.write_bytes(content)


DAMAGES = {
    "a flipped byte": flip_a_byte,
    "a cut file": lambda pages: pages.write_bytes(pages.read_bytes()[:-100]),
    "no metadata": lambda pages: (pages.parent / "metadata.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_loads_nothing_and_patches_nothing(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder / "pagedweight" / "pages-00001.safetensors")
    with pytest.raises(CheckpointError):
        pagedweight.load(folder)
    model = mixtral_m8(num_local_experts=2, intermediate_size=32)
    before = logits(model)
    with pytest.raises(CheckpointError):
        pagedweight.patch(model, checkpoint=folder)
    assert torch.equal(logits(model), before)


def test_an_interrupted_quantization_never_loads(tmp_path: Path) -> None:
    model = mixtral_m8(num_local_experts=2, intermediate_size=32)
    model.model.layers[1].mlp.experts.down_proj.data[1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        pagedweight.quantize(model, tmp_path)
    with pytest.raises(CheckpointError):
        pagedweight.load(tmp_path)


def test_a_missing_tensor_beside_the_pages_is_not_made_up(folder: Path) -> None:
    rest = load_file(folder / "model.safetensors")
    del rest["model.layers.1.self_attn.q_proj.weight"]
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.q_proj\.weight"):
        pagedweight.load(folder)


@pytest.mark.parametrize("name", ["policy.json", "policy.safetensors"])
def test_a_folder_without_its_policy_is_refused_unless_one_is_given(folder: Path, name: str) -> None:
    policy = Policy.load(folder / "pagedweight")
    (folder / "pagedweight" / name).unlink()
    with pytest.raises(CheckpointError, match=r"not both policy\.json and .* copy the whole folder, or give a policy"):
        pagedweight.load(folder)
    assert pagedweight.load(folder, policy=policy).pagedweight.snapshot().mean_bits == 6


def test_a_policy_for_another_model_is_refused(folder: Path) -> None:
    policy = Policy.load(quantized_folder("M8") / "pagedweight")
    with pytest.raises(ValueError, match="linear-blocks that are not the model's"):
        pagedweight.load(folder, policy=policy)
    policy.save(folder / "pagedweight")
    with pytest.raises(ValueError, match="linear-blocks that are not the model's"):
        pagedweight.load(folder)


def test_a_folder_can_be_saved_over_by_the_model_that_came_from_it(folder: Path) -> None:
    model = pagedweight.load(folder)
    before = logits(model)
    pagedweight.save(model, folder)
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(pagedweight.load(folder)), before)


def test_a_config_that_does_not_speak_of_pages_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not say that its experts are paged"):
        pagedweight.load(folder)


def test_case_95_registering_twice_is_harmless() -> None:
    hf_quantizer._register()


def test_from_pretrained_quantizes_a_dense_folder(tmp_path: Path) -> None:
    mixtral_m8(num_local_experts=2, intermediate_size=32).save_pretrained(tmp_path / "dense")
    model = pagedweight.from_pretrained(tmp_path / "dense", config=RuntimeConfig(budget_bytes=2**20))
    pagedweight.quantize(tmp_path / "dense", tmp_path / "paged")
    assert torch.equal(logits(model), logits(pagedweight.load(tmp_path / "paged")))


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        pagedweight.quantize(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("write", ["save", "save_pretrained", "quantize"])
def test_a_dense_model_is_not_written_over(tmp_path: Path, write: str) -> None:
    """Its experts would be gone for good: pages are not what they were made from."""
    dense = mixtral_m8(num_local_experts=2, intermediate_size=32)
    dense.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if write != "quantize":
        pagedweight.patch(dense)
    writers = {
        "save": pagedweight.save,
        "save_pretrained": lambda model, folder: model.save_pretrained(folder),
        "quantize": pagedweight.quantize,
    }
    with pytest.raises(ValueError, match="holds a dense model, whose weights would be lost; write to another folder"):
        writers[write](dense, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_importance_changes_what_is_kept(tmp_path: Path) -> None:
    model = mixtral_m8(num_local_experts=2, intermediate_size=32)
    block = next(iter(Checkpoint.open(pagedweight.quantize(model, tmp_path / "plain")).layout.blocks()))
    stakes = torch.ones(64)
    stakes[0] = 1e6
    pagedweight.quantize(model, tmp_path / "weighed", importance={block: stakes})
    plain, weighed = (Checkpoint.open(tmp_path / name) for name in ("plain", "weighed"))
    assert not torch.equal(plain.table(block, 2), weighed.table(block, 2))
    other = [b for b in plain.layout.blocks() if b != block]
    assert all(torch.equal(plain.table(b, 2), weighed.table(b, 2)) for b in other)
