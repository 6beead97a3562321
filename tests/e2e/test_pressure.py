"""Generating under one budget: the growing cache takes frames from expert weights, answers stay those of a slow
reference that replays the same widths, and the bits come back when the cache is gone."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import DynamicCache, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.runtime.frames import OutOfFrames
from tests.hf_models import FAMILIES, DenseReference, mixtral_m8, quantized_folder, tokens

BLOCK_TOKENS = 4
NEW_TOKENS = 56


class Step(NamedTuple):
    """One forward: the new token ids, the widths that kernels read, and the bytes held."""

    ids: torch.Tensor
    bits: np.ndarray
    kv_bytes: int
    weight_bytes: int


def tight(family: str, **changes) -> PreTrainedModel:
    """The family's model with room for its parent width and few KV blocks more.

    The last row can only rise while its old table lies beside its new one: 14 blocks leave room for that above the
    reload threshold.
    """
    settings = {"block_tokens": BLOCK_TOKENS, "offload_free_blocks": 2, "reload_free_blocks": 4, "min_dwell_steps": 2}
    settings = {**settings, "plan_period_steps": 2, **changes}
    roomy = pagedweight.load(quantized_folder(family), config=RuntimeConfig(budget_bytes=2**26, **settings))
    weights = roomy.pagedweight.snapshot().weight_bytes
    blocks = 14 * roomy.pagedweight.kv.block_bytes
    return pagedweight.load(
        quantized_folder(family), config=RuntimeConfig(budget_bytes=weights + blocks, **settings), verify=False
    )


def watch(model: PreTrainedModel) -> list[Step]:
    """Filled with every forward of the model, as it begins."""
    steps: list[Step] = []

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        seen = module.pagedweight.snapshot()
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        steps.append(Step(ids.clone(), seen.bits.copy(), seen.kv_bytes, seen.weight_bytes))
        module.pagedweight.check()

    model.register_forward_pre_hook(before, with_kwargs=True)
    return steps


@torch.no_grad()
def replay(reference: DenseReference, steps: list[Step]) -> list[torch.Tensor]:
    """Greedy next tokens of the dense model, its weights rebuilt before every forward."""
    cache = DynamicCache(config=reference.model.config)
    name = "cache" if "cache" in inspect.signature(reference.model.forward).parameters else "past_key_values"
    answers = []
    for step in steps:
        model = reference.set_bits(step.bits)
        answers.append(model(step.ids, use_cache=True, **{name: cache}).logits[:, -1].argmax(-1))
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_takes_bits_and_gives_them_back(family: str) -> None:
    model = tight(family)
    runtime = model.pagedweight
    full = runtime.snapshot()
    assert full.mean_bits == 6
    steps = watch(model)
    cache = runtime.new_cache()
    output = model.generate(tokens(2, 7), past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
    pressed = runtime.snapshot()
    assert pressed.mean_bits < 6
    assert pressed.weight_bytes < full.weight_bytes
    assert pressed.kv_bytes == cache.held_bytes > runtime.config.budget_bytes - full.weight_bytes
    assert pressed.kv_bytes + pressed.weight_bytes <= runtime.arena.memory.nbytes <= runtime.config.budget_bytes

    answers = replay(DenseReference(family), steps)
    assert len({tuple(step.bits) for step in steps}) > 3, "widths hardly moved, so the replay shows little"
    assert torch.equal(torch.stack(answers, dim=1), output[:, 7:])

    del cache
    for _ in range(40):
        runtime.boundary()
    rested = runtime.snapshot()
    assert (rested.mean_bits, rested.kv_bytes, rested.weight_bytes) == (6, 0, full.weight_bytes)
    runtime.check()


def test_weights_at_other_widths_would_have_answered_otherwise() -> None:
    """The replay above can fail: at the parent width throughout, the same forwards give other tokens."""
    model = tight("M8")
    steps = watch(model)
    cache = model.pagedweight.new_cache()
    output = model.generate(tokens(2, 7), past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
    parent = np.full(model.pagedweight.layout.rows, 6)
    answers = replay(DenseReference("M8"), [step._replace(bits=parent) for step in steps])
    assert not torch.equal(torch.stack(answers, dim=1), output[:, 7:])


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True}, {"padded": True}], ids=str)
def test_every_way_of_generating_runs_under_pressure(settings: dict) -> None:
    model = tight("M8")
    prompt = tokens(2, 7)
    mask = torch.ones_like(prompt)
    settings = dict(settings)
    if settings.pop("padded", False):
        mask[0, :3] = 0
    output = model.generate(
        prompt,
        attention_mask=mask,
        past_key_values=model.pagedweight.new_cache(),
        max_new_tokens=30,
        **{"do_sample": False, **settings},
    )
    assert output.shape == (2, 37)
    model.pagedweight.check()


def test_a_long_prompt_takes_its_room_before_the_forward() -> None:
    """A prefill far larger than the free blocks lowers widths at its boundary, not inside the forward."""
    model = tight("M8")
    steps = watch(model)
    cache = model.pagedweight.new_cache()
    with torch.no_grad():
        model(tokens(2, 90), past_key_values=cache)
    after = model.pagedweight.snapshot()
    assert (steps[0].bits == after.bits).all()
    assert steps[0].kv_bytes == cache.held_bytes
    assert after.mean_bits < 6


def test_a_sequence_that_cannot_fit_ends_in_a_sentence_and_the_rest_goes_on() -> None:
    model = tight("M8")
    cache = model.pagedweight.new_cache()
    with pytest.raises(OutOfFrames, match=r"bytes wanted: .* were free, .* more were released, .* are missing"):
        model.generate(tokens(4, 500), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.held_bytes == 0
    model.pagedweight.check()
    for _ in range(60):
        model.pagedweight.boundary()
    assert model.pagedweight.snapshot().mean_bits == 6
    assert model.generate(tokens(1, 5), past_key_values=cache, max_new_tokens=3, do_sample=False).shape == (1, 8)


def test_a_compiled_model_has_boundaries_and_a_growing_cache() -> None:
    ids = tokens(1, 9)
    logits, steps = [], []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        model = mixtral_m8(num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1, intermediate_size=32)
        pagedweight.patch(model, config=RuntimeConfig(budget_bytes=2**20))
        called, cache = wrap(model), model.pagedweight.new_cache()
        with torch.no_grad():
            logits.append([called(part, past_key_values=cache).logits for part in (ids, ids[:, :1])])
        steps.append((model.pagedweight.snapshot().step, cache.held_bytes))
    for eager, compiled in zip(*logits, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert steps[0] == steps[1]
    assert steps[0][0] == 2


def test_two_caches_share_the_arena() -> None:
    model = tight("M8")
    first, second = model.pagedweight.new_cache(), model.pagedweight.new_cache()
    with torch.no_grad():
        model(tokens(1, 9), past_key_values=first)
        model(tokens(1, 9), past_key_values=second)
    assert model.pagedweight.snapshot().kv_bytes == first.held_bytes + second.held_bytes
    first.release()
    assert model.pagedweight.snapshot().kv_bytes == second.held_bytes > 0


def test_widths_can_be_held_while_something_is_measured() -> None:
    model = tight("M8")
    with model.pagedweight.held_at(3), torch.no_grad():
        for _ in range(12):
            model(tokens(1, 5))
        assert set(model.pagedweight.snapshot().bits) == {3}
    with torch.no_grad():
        for _ in range(40):
            model(tokens(1, 5))
    assert model.pagedweight.snapshot().mean_bits == 6
