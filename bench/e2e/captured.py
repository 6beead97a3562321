"""Decoding at one context length with the whole step in one CUDA graph, for dense models and patched ones alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench.e2e.decoding import Mark
from bench.timing import capture

WHOLE_CACHE = "whole_cache"
WARM_UP_STEPS = 2
KERNELS_LISTED = 40


def attend_to_whole_cache() -> None:
    """Make known to transformers an attention of one new token to every slot of a full static cache, without a mask:
    with one, torch takes a kernel that reads the keys of a head by a single multiprocessor."""
    AttentionInterface.register(WHOLE_CACHE, sdpa_attention_forward)
    AttentionMaskInterface.register(WHOLE_CACHE, lambda *args, **kwargs: None)


class CapturedDecoding:
    """A batch that decodes with `context_tokens` keys in its static cache. On the CPU the step is called as it is.

    Past keys and values are drawn. A sequence's next token is its likeliest, moved by a drawn offset of its own: random
    weights would soon write the same token everywhere, and then every sequence would call the same experts.
    ids: (B, 1), the next step's tokens. logits: (B, vocabulary) of the last step.
    """

    logits: torch.Tensor

    def __init__(self, model: PreTrainedModel, batch: int, context_tokens: int) -> None:
        self.model, self.batch, self.context_tokens = model, batch, context_tokens
        self.cache = drawn_cache(model, batch, context_tokens)
        self._vocabulary = model.config.vocab_size
        drawn = torch.Generator(model.device).manual_seed(0)
        options = {"generator": drawn, "device": model.device}
        self._first_ids = torch.randint(self._vocabulary, (batch, 1), **options)
        self._offsets = torch.randint(self._vocabulary, (batch, 1), **options)
        self.ids = self._first_ids.clone()
        self._graph = self._capture() if model.device.type == "cuda" else None

    def restart(self, steps: int) -> None:
        """From the first tokens again, with so many steps to go before the cache is full."""
        self.ids.copy_(self._first_ids)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context_tokens - steps)

    def step(self) -> None:
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def milliseconds(self, steps: int, before: Callable[[], None] | None = None) -> np.ndarray:
        """(steps,), from the end of one step to that of the next; before: called ahead of each.

        The host is one step ahead of the device, no more, as where every step's tokens are looked at.
        """
        self.restart(steps)
        marks = [Mark(self.model.device)]
        for at in range(steps):
            marks[max(0, at - 1)].wait()
            if before is not None:
                before()
            self.step()
            marks.append(Mark(self.model.device))
        marks[-1].wait()
        return np.array([mark.ms_until(after) for mark, after in pairwise(marks)])

    def kernels(self, steps: int = 4) -> list[dict]:
        """What one step spends its time in: calls and microseconds by kernel, the longest first."""
        self.restart(steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                self.step()
            torch.cuda.synchronize()
        spent = [
            {"kernel": event.key[:100], "calls": event.count / steps, "us": event.device_time_total / steps}
            for event in profiler.key_averages()
        ]
        return sorted(spent, key=lambda row: -row["us"])[:KERNELS_LISTED]

    @torch.no_grad()
    def _forward(self) -> None:
        output = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.logits = output.logits[:, -1]
        self.ids.copy_((self.logits.argmax(-1, keepdim=True) + self._offsets) % self._vocabulary)

    def _capture(self) -> torch.cuda.CUDAGraph:
        self.restart(WARM_UP_STEPS + 1)
        graph = capture(self._forward, WARM_UP_STEPS)
        torch.cuda.synchronize()
        return graph


def drawn_cache(model: PreTrainedModel, batch: int, tokens: int) -> StaticCache:
    """Random keys and values in every slot."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    like = torch.empty(batch, config.num_key_value_heads, 1, head, dtype=model.dtype, device=model.device)
    cache = StaticCache(config=config, max_cache_len=tokens)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
        layer.keys.normal_()
        layer.values.normal_()
    return cache
