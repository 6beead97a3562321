"""Layers on two GPUs: tables, streams and pages of each device's own, with either of them current."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import pagedweight
from pagedweight import RuntimeConfig
from tests.hf_models import mixtral_m8, tokens
from tests.support import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

LAYERS = 4
SETTINGS = {"offload_free_blocks": 2, "reload_free_blocks": 4, "min_dwell_steps": 2, "block_tokens": 4}
DEVICE_MAP = {
    "model.embed_tokens": 0,
    "model.rotary_emb": 0,
    **{f"model.layers.{number}": number // 2 for number in range(LAYERS)},
    "model.norm": 1,
    "lm_head": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pagedweight.quantize(mixtral_m8(num_hidden_layers=LAYERS), tmp_path_factory.mktemp("spread"), device="cpu")


@torch.no_grad()
def test_case_97_layers_on_two_gpus_give_the_answers_of_one_while_pages_move(folder: Path) -> None:
    reference = pagedweight.load(folder)
    weights = reference.pagedweight.snapshot().weight_bytes
    config = RuntimeConfig(budget_bytes=weights // 2 + 2**17, **SETTINGS)
    model = pagedweight.load(folder, config=config, device_map=DEVICE_MAP)
    paged = model.pagedweight
    assert [str(part.arena.memory.device) for part in paged.parts] == ["cuda:0", "cuda:1"]
    ids = tokens(2, 9)
    for current in (0, 1):
        with torch.cuda.device(current):
            for bits in (6, 3, 2, 5):
                reference.pagedweight.set_bits(bits)
                with paged.held_at(bits):
                    assert_close(model(ids.to("cuda:0")).logits.cpu(), reference(ids).logits)
    cache, lowest = paged.new_cache(), paged.snapshot().mean_bits
    got = tokens(4, 9).to("cuda:0")
    for _ in range(120):
        got = model(got[:, -1:], past_key_values=cache).logits.argmax(-1).to("cuda:0")
        lowest = min(lowest, paged.snapshot().mean_bits)
    assert lowest < 6
    cache.release()
    for _ in range(60):
        paged.boundary()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    paged.check()
    assert paged.snapshot().kv_bytes == 0
    with paged.held_at(4):
        reference.pagedweight.set_bits(4)
        assert_close(model(ids.to("cuda:0")).logits.cpu(), reference(ids).logits)


@torch.no_grad()
def test_a_dense_model_spread_by_auto_is_patched_where_it_is(tmp_path: Path) -> None:
    mixtral_m8(num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    model = pagedweight.from_pretrained(tmp_path, device_map="balanced", experts_implementation="eager")
    reference = pagedweight.from_pretrained(tmp_path, experts_implementation="eager")
    assert {str(device) for device in model.hf_device_map.values()} == {"0", "1"}
    assert len(model.pagedweight.parts) == 2
    model.save_pretrained(tmp_path / "paged")
    again = pagedweight.load(tmp_path / "paged", device_map="balanced")
    assert len(again.pagedweight.parts) == 2
    ids = tokens(2, 9)
    assert_close(again(ids.to(again.device)).logits.cpu(), reference(ids).logits)
    assert_close(model(ids.to(model.device)).logits.cpu(), reference(ids).logits)
