"""KV pressure: how many KV blocks are free, and what that means in bytes (Eq. 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pagedweight.runtime.frames import Arena


class KVState(NamedTuple):
    """free_blocks: F_blk, blocks that could be allocated now. block_bytes: B_KV, bytes of one block over all layers.

    pending_blocks: blocks that the coming forward will take. spare_bytes: free bytes that make up no whole block.
    """

    free_blocks: int
    block_bytes: int
    pending_blocks: int = 0
    spare_bytes: int = 0

    def __str__(self) -> str:
        pending = f", of which the coming forward takes {self.pending_blocks}" if self.pending_blocks else ""
        return f"{self.free_blocks} KV blocks of {self.block_bytes} bytes free{pending}"

    def bytes_above(self, threshold_blocks: int) -> int:
        """Bytes that can be taken while more free blocks than the threshold stay; negative when fewer are free."""
        return (self.headroom_blocks - threshold_blocks - 1) * self.block_bytes + self.spare_bytes

    @property
    def headroom_blocks(self) -> int:
        """Free blocks left after the coming forward; negative when it does not fit."""
        return self.free_blocks - self.pending_blocks


class KVGauge(Protocol):
    """Where free KV blocks are counted: the arena, an allocator, a serving engine's block manager."""

    def read(self) -> KVState:
        """The state now; must not wait for the device."""
        ...


def target_bytes(state: KVState, threshold_blocks: int) -> int:
    """Bytes D to release so that free blocks rise above the threshold, Eq. (7); pending growth counts as taken."""
    return max(0, threshold_blocks + 1 - state.headroom_blocks) * state.block_bytes


def checked(state: KVState) -> KVState:
    """The state unchanged, or ValueError when a gauge reports what cannot be."""
    if state.free_blocks < 0 or state.pending_blocks < 0 or state.spare_bytes < 0:
        raise ValueError(f"the KV gauge reports {state}; blocks and bytes cannot be negative")
    if state.block_bytes < 1:
        raise ValueError(f"the KV gauge reports block_bytes {state.block_bytes}; a KV block needs at least one byte")
    return state


class CallableGauge:
    """A gauge from a function that returns a KVState, for engines that count their own blocks."""

    def __init__(self, read_state: Callable[[], KVState]) -> None:
        self._read_state = read_state

    def read(self) -> KVState:
        return checked(self._read_state())


class ArenaGauge:
    """A gauge for KV blocks that live in the arena itself: a released page's frames are free blocks at once."""

    def __init__(self, arena: Arena, block_frames: int) -> None:
        if block_frames < 1:
            raise ValueError(f"a KV block of {block_frames} frames was asked for; it needs at least one")
        self._arena = arena
        self._block_frames = block_frames

    def read(self) -> KVState:
        blocks, spare_frames = divmod(self._arena.free_frames, self._block_frames)
        frame_bytes = self._arena.frame_bytes
        return KVState(blocks, self._block_frames * frame_bytes, spare_bytes=spare_frames * frame_bytes)
