"""The one hook that a patched transformers model carries: everything that happens between two forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagedweight.experts import TokenSlots

PADDING = -1
CACHE_NAMES = ("past_key_values", "cache")


class ForwardCache(Protocol):
    """A KV cache in the arena that can say and take what a forward needs."""

    def missing_frames(self, batch: int, tokens: int) -> int: ...

    def frames_by_sequence(self, batch: int) -> list[int]: ...

    def reserve(self, batch: int, tokens: int) -> None: ...


class Boundary(Protocol):
    """What the hook calls: the patched model's runtime."""

    slots: TokenSlots
    max_requests: int

    def forward_cache(self, cache: object) -> ForwardCache | None:
        """The cache when it lives in this model's arena, None for any other; ValueError for another model's."""
        ...

    def boundary(self, pending_frames: int = 0, cached_frames: Sequence[int] = ()) -> None: ...

    def begin_requests(self, batch: int) -> None: ...


def add_boundary_hook(model: nn.Module, runtime: Boundary) -> RemovableHandle:
    """Call the boundary before every forward of the model, generate's and direct ones alike."""
    return model.register_forward_pre_hook(BeforeForward(runtime), with_kwargs=True)


class BeforeForward:
    """A pre-hook, since that sees what only the forward knows: how many tokens are new, which are padding, the cache.

    A compiled model runs it too, as ordinary Python between graphs; an exported one has no boundaries.
    """

    def __init__(self, runtime: Boundary) -> None:
        self._runtime = runtime

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_exporting():
            self._boundary(args, kwargs)

    @torch.compiler.disable(reason="pages move between graphs, not inside one: compile without fullgraph")
    def _boundary(self, args: tuple, kwargs: dict) -> None:
        runtime = self._runtime
        shape = new_tokens(args, kwargs)
        if shape is None:
            runtime.slots.reset()
            runtime.boundary()
            return
        batch = shape[0]
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        set_slots(runtime.slots, mask, *shape, runtime.max_requests)
        given = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        cache = runtime.forward_cache(given)
        if cache is None:
            runtime.boundary()
        else:
            runtime.boundary(cache.missing_frames(*shape), cache.frames_by_sequence(batch))
            cache.reserve(*shape)
        if given is None or not given.get_seq_length():
            runtime.begin_requests(batch)


def new_tokens(args: tuple, kwargs: dict) -> tuple[int, int] | None:
    """(batch, new tokens per sequence) of a forward, None when it has neither ids nor embeddings."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        ids = kwargs.get("inputs_embeds")
    return None if ids is None else (ids.shape[0], ids.shape[1])


def set_slots(slots: TokenSlots, mask: object, batch: int, tokens: int, max_requests: int) -> None:
    """Every token in its batch row's request slot, except what a 2-D attention mask (B, past + T) says is padding."""
    masked = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == batch
    if max_requests == 1 and not masked:
        slots.reset()
        return
    device = slots.view(1).device
    rows = (torch.arange(batch, dtype=torch.int32, device=device) % max_requests)[:, None].expand(batch, tokens)
    if masked:
        rows = torch.where(mask[:, -tokens:].to(device).bool(), rows, PADDING)
    slots.set(rows.reshape(-1))
