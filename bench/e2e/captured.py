"""Decoding at one context length with the whole step in one CUDA graph, for dense models and patched ones alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench.e2e.decoding import Mark

WHOLE_CACHE = "whole_cache"
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WARM_UP_STEPS = 2
KERNELS_LISTED = 100
RECOMPILE_LIMIT = 32  # kinds of experts, and one sequence or more


def attend_to_whole_cache() -> None:
    """Make known to transformers an attention of one new token to every slot of a full static cache, without a mask."""
    AttentionInterface.register(WHOLE_CACHE, sdpa_attention_forward)
    AttentionMaskInterface.register(WHOLE_CACHE, lambda *args, **kwargs: None)


class PlainCache(StaticCache):
    """A static cache whose layers share one position, which the caller moves on: transformers' own compute it anew in
    each. Compiled layers call it as ordinary Python, or their numbers would each be compiled for."""

    position: torch.Tensor

    def share_position(self) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=self.layers[0].keys.device)
        for layer in self.layers:
            layer.cumulative_length = self.position[0]

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self.position, key_states)
        layer.values.index_copy_(2, self.position, value_states)
        return layer.keys, layer.values


def compile_layers(model: PreTrainedModel, *, experts_too: bool) -> None:
    """Let torch.compile fuse what is small in every decoder layer; the cache stays as it is, and experts unless told.

    Call it again when experts have been replaced; what is compiled already is used again.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # or a graph for each layer's number
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for layer in model.model.layers:
        experts = layer.mlp.experts
        vars(experts).pop("forward", None)
        if not experts_too:
            experts.forward = torch.compiler.disable(experts.forward)
        layer.compile(dynamic=True)


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
    def _forward(self) -> None:
        output = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache.position.add_(1)
        self.logits = output.logits[:, -1]
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


def drawn_cache(model: PreTrainedModel, batch: int, tokens: int) -> PlainCache:
    """Random keys and values in every slot."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    like = torch.empty(batch, config.num_key_value_heads, 1, head, dtype=model.dtype, device=model.device)
    cache = PlainCache(config=config, max_cache_len=tokens)
    drawn = torch.Generator(model.device).manual_seed(1)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
        layer.keys.normal_(generator=drawn)
        layer.values.normal_(generator=drawn)
    cache.share_position()
    return cache
