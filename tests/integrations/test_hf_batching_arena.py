"""Continuous batching in the arena: weights make room for requests, tokens stay exact, and nobody is evicted before."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")
pytest.importorskip("psutil", reason="continuous batching needs psutil")

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.discovery import find_experts
from pagedweight.integrations.hf_hooks import SECTORS
from pagedweight.patching_sizes import resident_bytes
from tests.hf_models import FAMILIES, gemma4_g16, quantized_folder, tokens

pytestmark = pytest.mark.skipif(find_spec(SECTORS) is None, reason="sectors came with transformers 5.18")

NEW_TOKENS = 32
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 30, 41)]
SETTINGS = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
MAKE = {
    "M8": FAMILIES["M8"],
    "G16": lambda: gemma4_g16(global_head_dim=32, num_global_key_value_heads=1),  # layers differ, as in the 26B
}


def coarse(family: str) -> PreTrainedModel:
    """The family's model with four values in every expert row, which tables of every width hold exactly.

    So its answers do not depend on widths, however often these change, and any other difference is a fault.
    """
    model = MAKE[family]()
    for experts in find_experts(model):
        levels = (torch.where(w.abs() > 0.34, 0.75, 0.125).copysign(w) for w in experts.weights())
        experts.put_weights(*levels)
    return model


@pytest.fixture(scope="module", params=list(MAKE))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A quantized folder, and the dense model's own tokens."""
    model = coarse(request.param)
    folder = pagedweight.quantize(model, tmp_path_factory.mktemp(request.param))
    with torch.no_grad():
        wanted = [model.generate(torch.tensor([p]), SETTINGS)[0, len(p) :].tolist() for p in PROMPTS]
    return folder, wanted


def batching(num_blocks: int | None = None, **changes) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=64, page_size=16, **changes)


def with_budget(folder: Path, room_blocks: int, **changes) -> PreTrainedModel:
    """Patched with a budget of the weights at the floor width and so many KV blocks of 16 tokens."""
    settings = {"offload_free_blocks": 1, "reload_free_blocks": 3, "min_dwell_steps": 2, "plan_period_steps": 2}
    roomy = pagedweight.load(folder, config=RuntimeConfig(budget_bytes=2**24, **settings))
    paged = roomy.pagedweight
    floor = int(resident_bytes(paged.layout, paged.arena.frame_bytes)[:, 0].sum())
    budget = floor + room_blocks * paged.kv.block_bytes
    return pagedweight.load(folder, config=RuntimeConfig(budget_bytes=budget, **settings, **changes), verify=False)


def watch(model: PreTrainedModel) -> list[tuple[float, int]]:
    """Filled with the mean bits and the KV bytes at every forward."""
    seen: list[tuple[float, int]] = []

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        now = module.pagedweight.snapshot()
        seen.append((now.mean_bits, now.kv_bytes))
        module.pagedweight.check()

    model.register_forward_pre_hook(before, with_kwargs=True)
    return seen


@pytest.fixture
def evictions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Filled with the mean bits at each eviction that transformers sees fit to make."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    bits: list[float] = []
    offload = OffloadingManager.offload_requests

    def noted(self: OffloadingManager) -> bool:
        bits.append(self.scheduler.paged.snapshot().mean_bits)
        return offload(self)

    monkeypatch.setattr(OffloadingManager, "offload_requests", noted)
    return bits


def answers(model: PreTrainedModel, config: ContinuousBatchingConfig) -> list[list[int]]:
    outputs = model.generate_batch(PROMPTS, generation_config=SETTINGS, continuous_batching_config=config)
    assert not [output.error for output in outputs.values() if output.error]
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_weights_make_room_for_requests_and_tokens_are_exact(case, evictions: list[float], scheduler: str) -> None:
    folder, wanted = case
    model = with_budget(folder, room_blocks=40)
    paged, seen = model.pagedweight, watch(model)
    before = paged.snapshot().mean_bits
    assert answers(model, batching(scheduler_type=scheduler)) == wanted
    assert not evictions
    assert before > max(bits for bits, _ in seen[-5:])
    assert min(bits for bits, _ in seen) < before - 0.3
    assert max(held for _, held in seen) > min(held for _, held in seen)
    gc.collect()
    for _ in range(40):
        paged.boundary()
    assert paged.snapshot().kv_bytes == 0
    assert paged.snapshot().mean_bits >= before
    paged.check()


def test_requests_are_evicted_only_when_weights_have_nothing_left(case, evictions: list[float]) -> None:
    folder, wanted = case
    model = with_budget(folder, room_blocks=15, forecast_tokens=0)
    assert answers(model, batching()) == wanted
    assert evictions
    assert max(evictions) == model.pagedweight.layout.floor_width


def test_requests_hold_no_more_blocks_than_they_were_given(case, evictions: list[float]) -> None:
    folder, wanted = case
    model = with_budget(folder, room_blocks=60)
    seen = watch(model)
    assert answers(model, batching(num_blocks=8)) == wanted
    assert evictions
    blocks = model.pagedweight.kv.block_bytes
    assert max(held for _, held in seen) <= (8 + 2 + 2) * 2 * blocks


def test_a_manager_that_is_kept_serves_again_and_unpatching_takes_ours_away(case) -> None:
    folder, wanted = case
    model = with_budget(folder, room_blocks=40)
    for _ in range(2):
        outputs = model.generate_batch(
            PROMPTS, generation_config=SETTINGS, continuous_batching_config=batching(), persistent_manager=True
        )
        assert [output.generated_tokens for output in outputs.values()] == wanted
    model.destroy_cached_continuous_batching_manager()
    config = model.config.to_dict()
    pagedweight.unpatch(model)
    assert "init_continuous_batching" not in vars(model)
    assert model.config.to_dict() == config


def test_prefixes_that_requests_share_are_found_in_the_arena() -> None:
    model = with_budget(quantized_folder("M8"), room_blocks=60)
    prompt = tokens(1, 50)[0].tolist()
    model.pagedweight.set_bits(2)
    with model.pagedweight.held_at(2):
        outputs = model.generate_batch(
            [prompt, prompt, prompt], generation_config=SETTINGS, continuous_batching_config=batching(num_blocks=24)
        )
        alone = model.generate(torch.tensor([prompt]), SETTINGS)[0, 50:].tolist()
    assert [output.generated_tokens for output in outputs.values()] == [alone] * 3


def test_a_budget_without_room_for_a_sector_is_refused() -> None:
    model = with_budget(quantized_folder("M8"), room_blocks=2)
    with pytest.raises(ValueError, match="budget"):
        model.generate_batch(PROMPTS, generation_config=SETTINGS, continuous_batching_config=batching())
    model.pagedweight.check()


def test_gemma_4_without_a_budget_is_batched_too(case) -> None:
    folder, wanted = case
    model = pagedweight.load(folder)
    assert answers(model, batching(num_blocks=64)) == wanted
