"""The arena: one device byte range cut into frames, each with exactly one owner. No policy lives here.

Single frames (planes, KV) come from the high end and contiguous runs (tables, KV slabs) from the low end, so that
runs stay easy to find. Bookkeeping is on the host; the device never waits for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.runtime.config import FRAME_ALIGNMENT_BYTES

_SCAN_FRAMES = 4096
_FREE = 0


class OwnerKind(enum.IntEnum):
    """What a frame holds."""

    FREE = _FREE
    PLANE = 1
    TABLE = 2
    KV = 3


class Owner(NamedTuple):
    """Who holds a frame; row is the table row of a plane or table (an array: one for each frame), -1 for KV that may
    move within the arena and -2 for KV whose holder knows it by its place."""

    kind: OwnerKind
    row: int | np.ndarray = -1


KV_OWNER = Owner(OwnerKind.KV)
FIXED_KV_OWNER = Owner(OwnerKind.KV, -2)


class OutOfFrames(RuntimeError):
    """The arena has too few free frames, or no run that is long enough, right now; nothing was allocated."""


class Arena:
    """budget_bytes of device memory as whole frames; what does not fill a frame is not taken.

    memory: uint8 (frames * frame_bytes,), 128-byte aligned. Uninitialised.
    """

    def __init__(self, budget_bytes: int, frame_bytes: int, device: torch.device | str = "cpu") -> None:
        if frame_bytes < 1 or frame_bytes % FRAME_ALIGNMENT_BYTES:
            raise ValueError(f"frame_bytes is {frame_bytes}; give a positive multiple of {FRAME_ALIGNMENT_BYTES}")
        self.frames = budget_bytes // frame_bytes
        if self.frames < 1:
            raise ValueError(f"the budget of {budget_bytes} bytes holds no frame of {frame_bytes} bytes; raise it")
        self.frame_bytes = frame_bytes
        self.memory = _aligned_bytes(self.frames * frame_bytes, device)
        self.rows = self.memory.view(self.frames, frame_bytes)
        self._base_address = self.memory.data_ptr()
        # One byte a frame, seen twice: as an array, and as bytes, in which a run of free frames is a run of zeros.
        self._kind_bytes = bytearray(self.frames)
        self._kind = np.frombuffer(self._kind_bytes, dtype=np.uint8)
        self._row = np.full(self.frames, -1, dtype=np.int32)
        self._held = np.zeros(len(OwnerKind), dtype=np.int64)
        self._held[_FREE] = self.frames
        # Every frame at or above _high, and every frame below _low, is taken: searches start there.
        self._high = self.frames
        self._low = 0

    @property
    def free_frames(self) -> int:
        return int(self._held[_FREE])

    @property
    def free_bytes(self) -> int:
        return self.free_frames * self.frame_bytes

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes held by planes, tables and KV, and free bytes; they sum to the arena."""
        return {kind.name.lower(): int(self._held[kind]) * self.frame_bytes for kind in OwnerKind}

    @property
    def kinds(self) -> np.ndarray:
        """uint8 (frames,), the OwnerKind of every frame: a view that follows the arena, for reading."""
        return self._kind

    @property
    def owner_rows(self) -> np.ndarray:
        """int32 (frames,), the table row that every frame belongs to, negative for KV (see Owner) and free frames;
        likewise a view."""
        return self._row

    def owner(self, frame: int) -> Owner:
        return Owner(OwnerKind(int(self._kind[frame])), int(self._row[frame]))

    def are_owned_by(self, frames: np.ndarray, owner: Owner) -> bool:
        """Whether an owner (one, or one for each frame) holds all of these frames."""
        return bool((self._kind[frames] == owner.kind).all() and (self._row[frames] == owner.row).all())

    def address(self, frames: np.ndarray) -> np.ndarray:
        """int64 absolute device addresses of frames."""
        return self._base_address + np.asarray(frames, dtype=np.int64) * self.frame_bytes

    def view(self, frame: int, count: int = 1) -> torch.Tensor:
        """uint8 (count * frame_bytes,), the memory of a frame or of a run of frames; writes go to the arena."""
        return self.memory[frame * self.frame_bytes : (frame + count) * self.frame_bytes]

    def allocate(self, count: int, owner: Owner) -> np.ndarray:
        """int64 (count,) ids of frames anywhere, ascending, the highest free ones. Raises OutOfFrames."""
        if count > self.free_frames:
            raise OutOfFrames(f"{count} frames of {self.frame_bytes} bytes wanted, {self.free_frames} are free")
        frames = self.highest_free(count)
        if count:
            self._high = int(frames[0])
        self._take(frames, count, owner)
        return frames

    def highest_free(self, count: int, *, outside: tuple[int, int] = (0, 0)) -> np.ndarray:
        """int64 (count,) ids of the highest free frames, ascending, none of them in the range [start, stop) outside
        which they are wanted. So many must be free there.
        """
        found: list[np.ndarray] = []
        missing, stop = count, self._high
        while missing:
            start = max(0, stop - _SCAN_FRAMES)
            free = start + np.flatnonzero(self._kind[start:stop] == _FREE)
            free = free[(free < outside[0]) | (free >= outside[1])][-missing:]
            found.append(free)
            missing -= len(free)
            stop = start
        return np.concatenate(found[::-1]) if found else np.empty(0, dtype=np.int64)

    def allocate_run(self, count: int, owner: Owner) -> int:
        """First id of `count` contiguous frames, the lowest that fit. Raises OutOfFrames."""
        first = self._find_run(count)
        self._take(slice(first, first + count), count, owner)
        return first

    def take_run(self, first: int, count: int, owner: Owner) -> None:
        """Take exactly these contiguous frames. ValueError, and no change, when one of them is not free."""
        if self._kind[first : first + count].any():
            raise ValueError(f"frames {first} to {first + count} are not all free; move what is there first")
        self._take(slice(first, first + count), count, owner)

    def free(self, frames: np.ndarray | Sequence[int]) -> None:
        """Give frames back. ValueError, and no change, when a frame is free already or named twice."""
        frames = np.asarray(frames, dtype=np.int64)
        kinds = self._kind[frames]
        if not kinds.all():
            raise ValueError(f"frame {int(frames[kinds == 0][0])} is free already; a frame is given back once")
        if len(np.unique(frames)) != len(frames):
            raise ValueError("a frame is named twice in one release; a frame is given back once")
        if not len(frames):
            return
        self._held -= np.bincount(kinds, minlength=len(OwnerKind))
        self._held[_FREE] += len(frames)
        self._kind[frames] = _FREE
        self._row[frames] = -1
        self._high = max(self._high, int(frames.max()) + 1)
        self._low = min(self._low, int(frames.min()))

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """What the sources hold belongs to the targets now, which were free or are sources too. Moves no bytes."""
        kinds, rows = self._kind[sources], self._row[sources]
        assert kinds.all(), sources
        self._kind[sources], self._row[sources] = _FREE, -1
        assert not self._kind[targets].any(), targets
        self._kind[targets], self._row[targets] = kinds, rows
        self._high = max(self._high, int(sources.max()) + 1)
        self._low = min(self._low, int(sources.min()))

    def check(self) -> None:
        """Assert that the counts agree with the owners and that no free frame lies beyond the search marks."""
        held = np.bincount(self._kind, minlength=len(OwnerKind))
        assert (held == self._held).all(), (held, self._held)
        assert held.sum() == self.frames, (held, self.frames)
        assert self._kind[self._high :].all(), self._high
        assert self._kind[: self._low].all(), self._low
        weights = (self._kind == OwnerKind.PLANE) | (self._kind == OwnerKind.TABLE)
        assert (self._row[weights] >= 0).all()
        assert (self._row[self._kind == _FREE] == -1).all()
        assert (self._row[~weights] < 0).all()

    def _take(self, frames: np.ndarray | slice, count: int, owner: Owner) -> None:
        assert owner.kind != _FREE, owner
        self._kind[frames] = owner.kind
        self._row[frames] = owner.row
        self._held[owner.kind] += count
        self._held[_FREE] -= count

    def _find_run(self, count: int) -> int:
        """The lowest start of `count` free frames."""
        if count < 1:
            raise ValueError(f"a run of {count} frames was asked for; it needs at least one")
        first_free = self._kind_bytes.find(_FREE, self._low)
        self._low = first_free if first_free >= 0 else self.frames
        first = self._kind_bytes.find(bytes(count), self._low)
        if first < 0:
            raise OutOfFrames(
                f"a run of {count} frames of {self.frame_bytes} bytes wanted; {self.free_frames} frames are free, "
                "none of their runs is that long"
            )
        return first


def _aligned_bytes(count: int, device: torch.device | str) -> torch.Tensor:
    """uint8 (count,) aligned for kernels; an ordinary tensor even when made inside inference mode."""
    with torch.inference_mode(False):
        raw = torch.empty(count + FRAME_ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        shift = -raw.data_ptr() % FRAME_ALIGNMENT_BYTES
        return raw[shift : shift + count]
