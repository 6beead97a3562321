"""Steps that generate calls one by one, as a user without graphs has them: the form of the paper's Table 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from bench.e2e.captured import WHOLE_CACHE
from bench.e2e.decoding import Mark
from bench.e2e.drawn import Drawn
from bench.e2e.throughput_rows import Setting, fresh_peak, peak_bytes
from pagedweight import RuntimeConfig
from pagedweight.integrations.kv_pool import sequence_frames

SETTLING_STEPS = 8


def dense_generate_rows(model: PreTrainedModel, batches: list[int], setting: Setting) -> list[dict]:
    """bf16 with transformers' own choices: it decodes with batched GEMMs where experts are set to the grouped one."""
    model.set_experts_implementation("grouped_mm")
    caches: dict[str, Callable[[], Cache]] = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=setting.context_tokens),
    }
    return [
        generate_row(model, "bf16", name, make, batch, setting) for batch in batches for name, make in caches.items()
    ]


def paged_generate_rows(drawn: Drawn, width: int, batches: list[int], setting: Setting) -> list[dict]:
    """A patched model at one width, its KV cache in the same arena; its boundary runs before each forward."""
    rows = []
    for batch in batches:
        frame_bytes = drawn.store.host.sizes.frame_bytes
        held = batch * sequence_frames(drawn.kv_layers, frame_bytes, setting.context_tokens) * frame_bytes
        model = drawn.patched(RuntimeConfig(budget_bytes=drawn.resident_bytes()[width] + held))
        with model.pagedweight.held_at(width):
            row = generate_row(model, "uniform", "arena", model.pagedweight.new_cache, batch, setting)
        rows.append(row | {"width": width})
    return rows


def generate_row(
    model: PreTrainedModel, experts: str, cache: str, make: Callable[[], Cache], batch: int, setting: Setting
) -> dict:
    model.set_attn_implementation("sdpa")
    fresh_peak(model.device)
    took = generated(model, full_cache(model, make(), batch, setting), batch, setting)
    model.set_attn_implementation(WHOLE_CACHE)
    row = {"experts": experts, "cache": cache, "batch": batch, "step_ms": float(took.mean())}
    row |= {"median_step_ms": float(np.median(took)), "tokens_per_second": 1e3 * batch / float(took.mean())}
    row |= {"peak_reserved_bytes": peak_bytes(model.device)}
    print(json.dumps(row), flush=True)
    return row


def full_cache(model: PreTrainedModel, cache: Cache, batch: int, setting: Setting) -> Cache:
    """Random keys and values in all slots but those that are to be generated."""
    config, tokens = model.config, setting.context_tokens - setting.steps - SETTLING_STEPS
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size, drawn = (batch, config.num_key_value_heads, tokens, head), torch.Generator(model.device).manual_seed(1)
    options = {"generator": drawn, "dtype": model.dtype, "device": model.device}
    if hasattr(cache, "reserve"):
        cache.reserve(batch, tokens)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(size, **options), torch.randn(size, **options), layer)
    return cache


@torch.no_grad()
def generated(model: PreTrainedModel, cache: Cache, batch: int, setting: Setting) -> np.ndarray:
    """(steps - 1,) milliseconds from the beginning of one forward to that of the next."""
    marks: list[Mark] = []
    steps = setting.steps + SETTLING_STEPS
    drawn = torch.Generator(model.device).manual_seed(0)
    shape = (batch, setting.context_tokens - steps + 1)
    ids = torch.randint(model.config.vocab_size, shape, generator=drawn, device=model.device)
    hook = model.register_forward_pre_hook(lambda *_: marks.append(Mark(model.device)), prepend=True)
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "disable_compile": True}
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    finally:
        hook.remove()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return np.array([mark.ms_until(after) for mark, after in pairwise(marks[SETTLING_STEPS:])])
