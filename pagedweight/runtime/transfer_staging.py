"""Memory on the device, beside the arena, through which host bytes pass on their way into frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedweight.runtime.forks import LeftInForks
from pagedweight.runtime.frames import Arena

WORD = torch.complex128  # frames spread 16 bytes at a time
# An arena is at least so many halves: what lies beside it is not in its accounts.
_LEAST_HALVES = 128


class _Half(LeftInForks):
    """(frames, words) of staging memory; `free` is the event after which it may be overwritten."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.address = rows.data_ptr()
        self.free = torch.cuda.Event()
        # The memory may have been another tensor's, which kernels launched so far still use.
        self.free.record(torch.cuda.current_stream(rows.device))


class Staging:
    """Two halves of memory beside the arena, used in turn; made when they are first wanted."""

    def __init__(self, arena: Arena, most_bytes: int) -> None:
        self.half_frames = max(1, min(most_bytes // arena.frame_bytes, arena.frames // _LEAST_HALVES))
        self.half_bytes = self.half_frames * arena.frame_bytes
        self._shape = (2, self.half_frames, arena.frame_bytes // WORD.itemsize)
        self._device = arena.memory.device
        self._halves: list[_Half] = []

    def next_half(self, streams: Sequence[torch.cuda.Stream]) -> _Half:
        """The half that has been in use for longer; what comes next on the streams may overwrite it."""
        if not self._halves:
            with torch.inference_mode(False):  # or only what runs there could write to them
                self._halves = [_Half(rows) for rows in torch.empty(self._shape, dtype=WORD, device=self._device)]
        self._halves.reverse()
        for stream in streams:
            stream.wait_event(self._halves[0].free)
        return self._halves[0]
