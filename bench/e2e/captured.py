"""Decoding at one context length with the whole step in one CUDA graph, for dense models and patched ones alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench.e2e.compiled import compilation, compile_layers
from bench.e2e.decoding import Mark

WHOLE_CACHE = "whole_cache"
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WARM_UP_STEPS = 2
KERNELS_LISTED = 100


class Slots(NamedTuple):
    """One layer's keys and values (B, heads, tokens, head), and the (1,) slot that the next token is written to."""

    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor


def attend_to_whole_cache() -> None:
    """Make known to transformers an attention of one new token to every slot of a full cache, without a mask."""
    AttentionInterface.register(WHOLE_CACHE, whole_cache_attention)
    AttentionMaskInterface.register(WHOLE_CACHE, lambda *args, **kwargs: None)


def whole_cache_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, None]:
    """To the cache that has joined the model, after writing to it; without one, to the keys that are given."""
    slots = getattr(module, "slots", None)
    if slots is not None:
        key = slots.keys.index_copy_(2, slots.position, key)
        value = slots.values.index_copy_(2, slots.position, value)
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


class WholeCache(StaticCache):
    """A static cache whose layers share one position, which the caller moves on: transformers' own compute it anew in
    each. Attention writes to it: a layer then reads tensors alone, no number of its own, and one compiled graph serves
    all layers."""

    position: torch.Tensor

    def share_position(self) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=self.layers[0].keys.device)
        for layer in self.layers:
            layer.cumulative_length = self.position[0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    @contextmanager
    def joined(self, model: PreTrainedModel) -> Iterator[None]:
        """The model's attention writes to this cache and reads it, until the block is left."""
        attention = [layer.self_attn for layer in model.model.layers]
        for module, layer in zip(attention, self.layers, strict=True):
            module.slots = Slots(layer.keys, layer.values, self.position)
        try:
            yield
        finally:
            for module in attention:
                del module.slots


class CapturedDecoding:
    """A batch that decodes with `context_tokens` keys in its static cache. On the CPU the step is called as it is.

    Past keys and values are drawn. A sequence's next token is its likeliest, moved by a drawn offset of its own: random
    weights would soon write the same token everywhere, and then every sequence would call the same experts.
    ids: (B, 1), the next step's tokens. logits: (B, vocabulary) of the last step. compiled: compile_layers first.
    compilation: of compiled layers, how many graphs serve them.
    """

    logits: torch.Tensor

    def __init__(self, model: PreTrainedModel, batch: int, context_tokens: int, *, compiled: bool = False) -> None:
        if compiled:
            compile_layers(model)
        self.model, self.batch, self.context_tokens = model, batch, context_tokens
        self.cache = drawn_cache(model, batch, context_tokens)
        self._vocabulary = model.config.vocab_size
        drawn = torch.Generator(model.device).manual_seed(0)
        options = {"generator": drawn, "device": model.device}
        self._first_ids = torch.randint(self._vocabulary, (batch, 1), **options)
        self._offsets = torch.randint(self._vocabulary, (batch, 1), **options)
        self.ids = self._first_ids.clone()
        self._graph = self._capture() if model.device.type == "cuda" else None
        if self._graph is None:
            self._forward()
        self.compilation = compilation() if compiled else {}

    def restart(self, steps: int) -> None:
        """From the first tokens again, with so many steps to go before the cache is full."""
        self.ids.copy_(self._first_ids)
        self.cache.position.fill_(self.context_tokens - steps)

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
            {"kernel": event.key[:120], "calls": event.count / steps, "us": event.device_time_total / steps}
            for event in profiler.key_averages()
        ]
        return sorted(spent, key=lambda row: -row["us"])[:KERNELS_LISTED]

    @torch.no_grad()
    def next_logits(self) -> torch.Tensor:
        """(B, vocabulary) of the next step, called as it is; the cache stays where it is."""
        with self.cache.joined(self.model):
            output = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def _forward(self) -> None:
        self.logits = self.next_logits()
        self.cache.position.add_(1)
        self.ids.copy_((self.logits.argmax(-1, keepdim=True) + self._offsets) % self._vocabulary)

    def _capture(self) -> torch.cuda.CUDAGraph:
        self.restart(WARM_UP_STEPS + 1)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        torch.backends.cuda.enable_cudnn_sdp(True)  # vLLM switches it off
        with sdpa_kernel(ATTENTION, set_priority=True):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    self._forward()
            stream.synchronize()
            # On the same stream: cuBLAS keeps a workspace for each that it is called on.
            with torch.cuda.graph(graph, stream=stream):
                self._forward()
        torch.cuda.synchronize()
        return graph


def drawn_cache(model: PreTrainedModel, batch: int, tokens: int) -> WholeCache:
    """Random keys and values in every slot."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    like = torch.empty(batch, config.num_key_value_heads, 1, head, dtype=model.dtype, device=model.device)
    cache = WholeCache(config=config, max_cache_len=tokens)
    drawn = torch.Generator(model.device).manual_seed(1)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
        layer.keys.normal_(generator=drawn)
        layer.values.normal_(generator=drawn)
    cache.share_position()
    return cache
