"""Arena frames for keys and values: the bytes that expert weights release are the bytes that a sequence takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.runtime.frames import KV_OWNER, Arena, OutOfFrames
from pagedweight.runtime.kv import KVState


class SlabShape(NamedTuple):
    """What one token of K or of V is in one layer: (heads, head_dim) of dtype."""

    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * self.head_dim * self.dtype.itemsize

    def tokens_per_frame(self, frame_bytes: int) -> int:
        """Tokens that fit a frame; ValueError when not even one does."""
        tokens = frame_bytes // self.token_bytes
        if tokens < 1:
            raise ValueError(
                f"one token of K or V is {self.token_bytes} bytes and an arena frame only {frame_bytes}; "
                f"give RuntimeConfig a frame_bytes of at least {self.token_bytes}"
            )
        return tokens


class FrameHoldings:
    """The KV frames of one cache, known apart from the cache, so that they can be freed after it is gone."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held = np.zeros(arena.frames, dtype=bool)

    @property
    def frames(self) -> int:
        return int(np.count_nonzero(self._held))

    def take(self, count: int) -> np.ndarray:
        """int64 (count,) ids of frames now held. Raises OutOfFrames."""
        frames = self._arena.allocate(count, KV_OWNER)
        self._held[frames] = True
        return frames

    def give(self, frames: np.ndarray) -> None:
        assert self._held[frames].all(), frames
        self._held[frames] = False
        self._arena.free(frames)

    def give_all(self) -> None:
        self.give(np.flatnonzero(self._held))


class KVPool:
    """Where the caches of one model take their frames; counts free KV blocks for the planner (a KVGauge).

    A block is block_tokens tokens of one sequence over all layers, in whole frames: B_KV = block_frames * frame_bytes.
    layers: (K shape, V shape) of every cached layer.
    make_room: asked for bytes when the arena has too few free frames; returns what it released.
    """

    def __init__(
        self,
        arena: Arena,
        layers: Sequence[tuple[SlabShape, SlabShape]],
        block_tokens: int,
        make_room: Callable[[int], int] | None = None,
    ) -> None:
        self.arena = arena
        self.layers = tuple(layers)
        self.block_frames = block_frames(self.layers, arena.frame_bytes, block_tokens)
        self.make_room = make_room
        self.pending_frames = 0
        self._abandoned: deque[FrameHoldings] = deque()

    @property
    def block_bytes(self) -> int:
        return self.block_frames * self.arena.frame_bytes

    def read(self) -> KVState:
        """Free blocks, and what the coming forward will take of them."""
        pending = -(-self.pending_frames // self.block_frames)
        return KVState(self.arena.free_frames // self.block_frames, self.block_bytes, pending)

    def abandon(self, holdings: FrameHoldings) -> None:
        """Note that the holdings' cache is gone. Safe wherever a garbage collector may run."""
        self._abandoned.append(holdings)

    def collect(self) -> None:
        """Free what caches that are gone still held."""
        while self._abandoned:
            self._abandoned.popleft().give_all()

    def take(self, holdings: FrameHoldings, count: int) -> np.ndarray:
        """count frames for the holdings; asks for room when the arena has too few. Raises OutOfFrames."""
        self.collect()
        short = count - self.arena.free_frames
        released = 0
        if short > 0 and self.make_room is not None:
            released = self.make_room(short * self.arena.frame_bytes)
        missing = count - self.arena.free_frames
        if missing > 0:
            raise OutOfFrames(
                f"the KV cache needs {count * self.arena.frame_bytes} bytes more; expert weights released {released} "
                f"and {missing * self.arena.frame_bytes} are still missing; raise budget_bytes, or serve fewer or "
                "shorter sequences"
            )
        return holdings.take(count)


def block_frames(layers: Sequence[tuple[SlabShape, SlabShape]], frame_bytes: int, block_tokens: int) -> int:
    """Frames of one KV block: block_tokens tokens of K and of V in every layer, rounded up once."""
    per_token = sum(1 / shape.tokens_per_frame(frame_bytes) for pair in layers for shape in pair)
    return max(1, int(np.ceil(round(block_tokens * per_token, 6))))
