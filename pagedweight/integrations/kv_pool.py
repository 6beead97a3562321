"""Arena frames for keys and values: the bytes that expert weights release are the bytes that a sequence takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol
from weakref import WeakSet

import numpy as np

from pagedweight.integrations.kv_places import Places, SlabShape
from pagedweight.runtime.frames import FIXED_KV_OWNER, KV_OWNER, Arena, OutOfFrames
from pagedweight.runtime.interrupts import InterruptsHeld


class Follower(Protocol):
    """Something that finds its keys or values by frame ids."""

    def follow(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """What was in the sources is in the targets now."""
        ...


class FrameHoldings:
    """The KV frames of one cache, known apart from the cache, so that they can be freed after it is gone.

    followers: what must learn of it when frames move within the arena. frames: how many are held.
    """

    def __init__(self, arena: Arena) -> None:
        self.followers: list[Follower] = []
        self.frames = 0
        self._arena = arena
        self._held = np.zeros(arena.frames, dtype=bool)

    def take(self, count: int, allocate: Callable[[int], np.ndarray]) -> np.ndarray:
        """int64 (count,) ids of frames now held. Raises what allocate(count) does."""
        with InterruptsHeld():
            frames = allocate(count)
            self._held[frames] = True
            self.frames += count
            return frames

    def give(self, frames: np.ndarray) -> None:
        assert self._held[frames].all(), frames
        with InterruptsHeld():
            self._held[frames] = False
            self.frames -= len(frames)
            self._arena.free(frames)

    def give_all(self) -> None:
        self.give(np.flatnonzero(self._held))

    def follow(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Those of the sources that are held here are at their targets now."""
        own = self._held[sources]
        if own.any():
            sources, targets = sources[own], targets[own]
            self._held[sources] = False
            self._held[targets] = True
            for follower in self.followers:
                follower.follow(sources, targets)


class Weights(Protocol):
    """Expert weights in the same arena, which give bytes up when asked."""

    def ensure_bytes(self, wanted_bytes: int) -> None:
        """Make bytes free. Raises OutOfFrames."""
        ...

    def allocate_kv(self, frames: int) -> np.ndarray:
        """int64 ids of frames for KV. Raises OutOfFrames."""
        ...

    def allocate_kv_window(self, frames: int, origin: int) -> int:
        """First id of contiguous frames for KV, a whole number of times their number from origin on. Raises
        OutOfFrames."""
        ...

    @property
    def releasable_bytes(self) -> int:
        """What weights could still give up."""
        ...


class KVPool:
    """Where the caches of one model take their frames.

    A block is block_tokens tokens of one sequence over all layers, in whole frames: B_KV = block_frames * frame_bytes.
    layers: (K shape, V shape) of every layer; None where a layer keeps no cache of its own.
    """

    def __init__(
        self,
        arena: Arena,
        layers: Sequence[tuple[SlabShape, SlabShape] | None],
        block_tokens: int,
    ) -> None:
        self.arena = arena
        self.layers = tuple(layers)
        self.block_frames = block_frames(self.layers, arena.frame_bytes, block_tokens)
        self._weights: Weights | None = None
        self._places: dict[SlabShape, Places] = {}
        self._abandoned: deque[FrameHoldings] = deque()
        self._holdings: WeakSet[FrameHoldings] = WeakSet()

    def draw_on(self, weights: Weights) -> None:
        """From now on, what is not free is taken from the expert weights."""
        self._weights = weights

    def places(self, shape: SlabShape) -> Places:
        """Where tokens of a shape lie, one object for all slabs."""
        if shape not in self._places:
            self._places[shape] = Places(self.arena, shape)
        return self._places[shape]

    def new_holdings(self) -> FrameHoldings:
        """For a new cache."""
        holdings = FrameHoldings(self.arena)
        self._holdings.add(holdings)
        return holdings

    def follow(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """KV frames have moved within the arena, between two forwards: every cache finds them at their targets."""
        for holdings in self._holdings:
            holdings.follow(sources, targets)

    @property
    def block_bytes(self) -> int:
        """B_KV."""
        return self.block_frames * self.arena.frame_bytes

    def blocks(self, frames: int) -> int:
        """Blocks that a number of frames amounts to, rounded up."""
        return -(-frames // self.block_frames)

    def abandon(self, holdings: FrameHoldings) -> None:
        """Note that the holdings' cache is gone. Safe wherever a garbage collector may run."""
        self._abandoned.append(holdings)

    def collect(self) -> None:
        """Free what caches that are gone still held."""
        while self._abandoned:
            with InterruptsHeld():
                self._abandoned.popleft().give_all()

    def take(self, holdings: FrameHoldings, count: int) -> np.ndarray:
        """int64 (count,) ids of frames for the holdings, made free first if need be. Raises OutOfFrames."""
        self.collect()
        return holdings.take(count, self._allocate)

    def take_window(self, holdings: FrameHoldings, count: int, origin: int) -> np.ndarray:
        """int64 (count,) ids of contiguous frames that never move, a whole number of times count from origin on; what
        is there moves, and weights give bytes up if need be. Raises OutOfFrames."""
        self.collect()

        def allocate(frames: int) -> np.ndarray:
            first = self._weights.allocate_kv_window(frames, origin)
            return np.arange(first, first + frames)

        return holdings.take(count, allocate)

    def take_run(self, holdings: FrameHoldings, count: int) -> np.ndarray:
        """int64 (count,) ids of the lowest contiguous frames that are free; they never move. Raises OutOfFrames."""

        def allocate(frames: int) -> np.ndarray:
            first = self.arena.allocate_run(frames, FIXED_KV_OWNER)
            return np.arange(first, first + frames)

        return holdings.take(count, allocate)

    @property
    def obtainable_bytes(self) -> int:
        """Bytes that are free or that weights could still give up."""
        return self.arena.free_bytes + (0 if self._weights is None else self._weights.releasable_bytes)

    def make_free(self, count: int) -> None:
        """See to it that so many frames are free. Raises OutOfFrames, and no cache is changed."""
        self.collect()
        if count > self.arena.free_frames and self._weights is not None:
            self._weights.ensure_bytes(count * self.arena.frame_bytes)
        if count > self.arena.free_frames:
            raise OutOfFrames(
                f"{count} frames of {self.arena.frame_bytes} bytes wanted, {self.arena.free_frames} are free"
            )

    def _allocate(self, count: int) -> np.ndarray:
        if self._weights is not None:
            return self._weights.allocate_kv(count)
        return self.arena.allocate(count, KV_OWNER)


def sequence_frames(layers: Sequence[tuple[SlabShape, SlabShape] | None], frame_bytes: int, tokens: int) -> int:
    """Frames that one sequence of so many tokens takes: unlike blocks, every slab has frames of its own."""
    shapes = [shape for pair in layers if pair is not None for shape in pair]
    return sum(-(-tokens // shape.tokens_per_frame(frame_bytes)) for shape in shapes)


def block_frames(layers: Sequence[tuple[SlabShape, SlabShape] | None], frame_bytes: int, block_tokens: int) -> int:
    """Frames of one KV block: block_tokens tokens of K and of V in every layer, rounded up once."""
    shapes = [shape for pair in layers if pair is not None for shape in pair]
    return max(1, math.ceil(sum(Fraction(block_tokens, shape.tokens_per_frame(frame_bytes)) for shape in shapes)))
