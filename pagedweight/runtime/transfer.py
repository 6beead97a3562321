"""Copies between host memory and arena frames, and fences that say when forwards have finished.

Every engine keeps one promise: a copy that has raised is settled, so nothing still reads or writes its frames.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pagedweight.runtime.frames import Arena


class FrameCopy(NamedTuple):
    """frames: int64 ids, in the order of the bytes. host: uint8 (len(frames) * frame_bytes,)."""

    frames: np.ndarray
    host: torch.Tensor


class Ticket(Protocol):
    """Work that finishes later. `done` and `wait` raise what went wrong with it."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def seconds(self) -> float:
        """How long a copy in took once it is done; 0 for other work."""
        ...


class TransferEngine(Protocol):
    def copy_in(self, copies: Sequence[FrameCopy]) -> Ticket:
        """Host to frames, after everything launched so far that may still use those frames."""
        ...

    def copy_out(self, copies: Sequence[FrameCopy]) -> Ticket:
        """Frames to host."""
        ...

    def fence(self) -> Ticket:
        """Done when every forward launched so far has finished."""
        ...

    def write_now(self, copies: Sequence[FrameCopy]) -> None:
        """Host to frames between the forwards launched so far and those launched next."""
        ...

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """The values on the arena's device, there for what is launched next."""
        ...

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Frames to frames that are free or among the sources, all read before one is written, between the forwards
        launched so far and those launched next."""
        ...

    def capturing(self) -> bool:
        """Whether what is launched now is recorded, to run later."""
        ...

    def close(self) -> None:
        """Wait for everything in flight."""
        ...


class Finished:
    """The ticket of work that is over already."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def seconds(self) -> float:
        return self._seconds


class ImmediateEngine:
    """For the CPU, where a forward has finished when it returns: every copy is done at once."""

    def __init__(self, arena: Arena) -> None:
        self._rows = arena.rows

    def copy_in(self, copies: Sequence[FrameCopy]) -> Ticket:
        began = time.perf_counter()
        self.write_now(copies)
        return Finished(time.perf_counter() - began)

    def copy_out(self, copies: Sequence[FrameCopy]) -> Ticket:
        for frames, host in copies:
            host.view(len(frames), -1).copy_(self._rows[torch.from_numpy(frames)])
        return Finished()

    def fence(self) -> Ticket:
        return Finished()

    def write_now(self, copies: Sequence[FrameCopy]) -> None:
        for frames, host in copies:
            self._rows.index_copy_(0, torch.from_numpy(frames), host.view(len(frames), -1))

    def upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self._rows.index_copy_(0, torch.from_numpy(targets), self._rows[torch.from_numpy(sources)])

    def capturing(self) -> bool:
        return False

    def close(self) -> None:
        return None
