"""Steps as generate calls them, one by one without graphs, or compiled: the form of the paper's Table 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache, StoppingCriteria

from bench.e2e.captured import WHOLE_CACHE
from bench.e2e.decoding import Mark
from bench.e2e.drawn import Drawn
from bench.e2e.throughput_memory import fresh_peak, peak_bytes
from bench.e2e.throughput_peers import GROUPED, register_peers
from bench.e2e.throughput_rows import Setting, patched_beside_cache
from pagedweight import RuntimeConfig
from pagedweight.integrations.kv_pool import sequence_frames

SETTLING_STEPS = 8


def dense_generate_rows(model: PreTrainedModel, batches: list[int], setting: Setting) -> list[dict]:
    """bf16 with transformers' own choices: it decodes with batched GEMMs where experts are set to the grouped one."""
    model.set_experts_implementation("grouped_mm")
    caches: dict[str, Callable[[], Cache]] = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: static_cache(model, setting),
    }
    return [
        generate_row(model, "bf16", name, make, batch, setting) for batch in batches for name, make in caches.items()
    ]


def dense_compiled_rows(model: PreTrainedModel, peers: list[str], batches: list[int], setting: Setting) -> list[dict]:
    """bf16 as generate compiles it of its own accord where the cache is static; then with grouped GEMMs all the way."""
    kinds, rows = {"bf16": "grouped_mm"}, []
    if GROUPED in peers:
        kinds[f"bf16, {GROUPED}"] = register_peers()[GROUPED]
    for batch in batches:
        for name, implementation in kinds.items():
            model.set_experts_implementation(implementation)
            rows.append(compiled_row(model, name, batch, setting))
    return rows


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


def paged_compiled_rows(drawn: Drawn, width: int, batches: list[int], setting: Setting) -> list[dict]:
    """The same with a static cache beside the arena, as generate compiles it."""
    model = patched_beside_cache(drawn, width)
    with model.pagedweight.held_at(width):
        return [compiled_row(model, "uniform", batch, setting) | {"width": width} for batch in batches]


def static_cache(model: PreTrainedModel, setting: Setting) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=setting.context_tokens)


def compiled_row(model: PreTrainedModel, experts: str, batch: int, setting: Setting) -> dict:
    torch._dynamo.reset()
    vars(model).pop("_compiled_call", None)  # transformers keeps what it compiled for the batch and the experts before
    return generate_row(
        model, experts, "static", lambda: static_cache(model, setting), batch, setting._replace(compiled=True)
    )


def generate_row(
    model: PreTrainedModel, experts: str, cache: str, make: Callable[[], Cache], batch: int, setting: Setting
) -> dict:
    model.set_attn_implementation("sdpa")
    fresh_peak(model.device)
    took = generated(model, full_cache(model, make(), batch, setting), batch, setting)
    model.set_attn_implementation(WHOLE_CACHE)
    row = {"experts": experts, "cache": cache, "compiled": setting.compiled, "batch": batch}
    row |= {"step_ms": float(took.mean()), "median_step_ms": float(np.median(took))}
    row |= {"tokens_per_second": 1e3 * batch / float(took.mean()), "peak_reserved_bytes": peak_bytes(model.device)}
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


class Steps(StoppingCriteria):
    """Marks every step's end, and never stops."""

    def __init__(self, device: torch.device) -> None:
        self.ends: list[Mark] = []
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.ends.append(Mark(self._device))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=self._device)


@torch.no_grad()
def generated(model: PreTrainedModel, cache: Cache, batch: int, setting: Setting) -> np.ndarray:
    """(steps - 1,) milliseconds from the end of one step to that of the next."""
    steps, marked = setting.steps + SETTLING_STEPS, Steps(model.device)
    drawn = torch.Generator(model.device).manual_seed(0)
    shape = (batch, setting.context_tokens - steps + 1)
    ids = torch.randint(model.config.vocab_size, shape, generator=drawn, device=model.device)
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    options |= {"disable_compile": not setting.compiled, "stopping_criteria": [marked]}
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return np.array([mark.ms_until(after) for mark, after in pairwise(marked.ends[SETTLING_STEPS:])])
