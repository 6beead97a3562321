"""The copy engine on CUDA: pages cross the bus on one stream and spread into their frames on another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from pagedweight.runtime.frames import Arena
from pagedweight.runtime.transfer import FrameCopy, Ticket

# A half of the staging memory: long enough that a launch costs nothing beside the copy, short enough that little is
# left to spread once the last bytes have crossed the bus.
_STAGING_BYTES = 16 * 2**20
_WORD = torch.complex128  # frames spread 16 bytes at a time


class _EventTicket:
    """An event on a stream; keeps what the copies read alive until it has passed."""

    def __init__(
        self, stream: torch.cuda.Stream, keep: Iterable[torch.Tensor] = (), began: torch.cuda.Event | None = None
    ) -> None:
        self._began = began
        self._event = torch.cuda.Event(enable_timing=began is not None)
        self._event.record(stream)
        self._keep = tuple(keep)

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds(self) -> float:
        return 0.0 if self._began is None else self._began.elapsed_time(self._event) / 1e3


class _Half:
    """(frames, words) of staging memory; `free` is the event after which it may be overwritten."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.free = torch.cuda.Event()


class CudaEngine:
    """Two streams beside the compute stream (the caller's current stream); nothing here waits for the device.

    Pages pass through a staging buffer on the device: a copy has a cost of its own that frames of a few KiB cannot
    carry, so host bytes that lie together cross the bus together and one kernel spreads the frames, while the next
    bytes already cross into the other half.
    """

    def __init__(self, arena: Arena, staging_bytes: int = _STAGING_BYTES) -> None:
        self._device = arena.memory.device
        self._rows = arena.rows
        self._words = arena.rows.view(_WORD)
        self._copy_stream = torch.cuda.Stream(self._device)
        self._spread_stream = torch.cuda.Stream(self._device)
        self._staging_frames = max(1, min(staging_bytes // arena.frame_bytes, arena.frames))
        self._halves: list[_Half] = []

    def copy_in(self, copies: Sequence[FrameCopy]) -> Ticket:
        keep = [_page_locked(host) for _, host in copies]
        sources = [FrameCopy(frames, host) for (frames, _), host in zip(copies, keep, strict=True)]
        began = torch.cuda.Event(enable_timing=True)
        began.record(self._copy_stream)
        with _settled(self._copy_stream, self._spread_stream):
            for batch, ids, half in self._batches(sources):
                self._copy_stream.wait_event(half.free)
                with torch.cuda.stream(self._copy_stream):
                    _fill(half.rows.view(torch.uint8).view(-1), [host for _, host in batch])
                self._spread_stream.wait_stream(self._copy_stream)
                with torch.cuda.stream(self._spread_stream):
                    self._words.index_copy_(0, ids, half.rows[: len(ids)])
                half.free.record(self._spread_stream)
            return _EventTicket(self._spread_stream, keep, began)

    def copy_out(self, copies: Sequence[FrameCopy]) -> Ticket:
        with _settled(self._copy_stream, self._spread_stream):
            for batch, ids, half in self._batches(copies):
                self._spread_stream.wait_event(half.free)
                with torch.cuda.stream(self._spread_stream):
                    torch.index_select(self._words, 0, ids, out=half.rows[: len(ids)])
                self._copy_stream.wait_stream(self._spread_stream)
                with torch.cuda.stream(self._copy_stream):
                    _drain(half.rows.view(torch.uint8), batch)
                half.free.record(self._copy_stream)
            return _EventTicket(self._copy_stream, (host for _, host in copies))

    def fence(self) -> Ticket:
        return _EventTicket(torch.cuda.current_stream(self._device))

    def write_now(self, copies: Sequence[FrameCopy]) -> None:
        for frames, host in copies:
            self._copy_runs(frames, _page_locked(host))

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        ids = self._on_device(np.stack([sources, targets]))
        self._words.index_copy_(0, ids[1], self._words.index_select(0, ids[0]))

    def close(self) -> None:
        for stream in (self._copy_stream, self._spread_stream, torch.cuda.current_stream(self._device)):
            stream.synchronize()

    def _copy_runs(self, frames: np.ndarray, host: torch.Tensor) -> None:
        """One copy per run of frames, on the current stream."""
        pieces = host.view(len(frames), -1)
        for start, stop in _runs(frames):
            first = int(frames[start])
            self._rows[first : first + stop - start].copy_(pieces[start:stop], non_blocking=True)

    def _batches(self, copies: Sequence[FrameCopy]) -> Iterator[tuple[list[FrameCopy], torch.Tensor, _Half]]:
        """Copies cut to what a half holds, each batch with its frames' ids on the device and the half that is next.

        On the spread stream, after everything launched so far on the compute stream that may use those frames.
        """
        if not copies:
            return
        self._spread_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._spread_stream):
            ids = self._on_device(np.concatenate([frames for frames, _ in copies]))
        for batch, part in zip(_cut(copies, self._staging_frames), ids.split(self._staging_frames), strict=True):
            yield batch, part, self._next_half()

    def _next_half(self) -> _Half:
        """The half that has been in use for longer."""
        if not self._halves:
            shape = (2, self._staging_frames, self._words.shape[1])
            self._halves = [_Half(rows) for rows in torch.empty(shape, dtype=_WORD, device=self._device)]
            # The memory may have been another tensor's, which kernels launched so far still use.
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._halves.reverse()
        return self._halves[0]

    def _on_device(self, frames: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(frames).pin_memory().to(self._device, non_blocking=True)


@contextmanager
def _settled(*streams: torch.cuda.Stream) -> Iterator[None]:
    """A failure half way leaves copies running; they end before anyone may reuse the frames."""
    with ExitStack() as on_error:
        for stream in streams:
            on_error.callback(stream.synchronize)
        yield
        on_error.pop_all()


def _page_locked(host: torch.Tensor) -> torch.Tensor:
    """The bytes in page-locked memory, so that the copy does not make the host wait for the device."""
    return host if host.is_pinned() else host.pin_memory()


def _cut(copies: Iterable[FrameCopy], most_frames: int) -> Iterator[list[FrameCopy]]:
    """The copies, in order, in batches of most_frames; only the last batch is smaller."""
    batch, room = [], most_frames
    for frames, host in copies:
        frame_bytes, at = host.numel() // len(frames), 0
        while at < len(frames):
            stop = min(len(frames), at + room)
            batch.append(FrameCopy(frames[at:stop], host[at * frame_bytes : stop * frame_bytes]))
            room -= stop - at
            at = stop
            if not room:
                yield batch
                batch, room = [], most_frames
    if batch:
        yield batch


def _fill(target: torch.Tensor, hosts: list[torch.Tensor]) -> None:
    """Copy page-locked pieces one behind the other; neighbours in host memory go as one copy."""
    places = [(host.untyped_storage().data_ptr(), host.data_ptr(), host.numel()) for host in hosts]
    memory, address, sizes = np.array(places, dtype=np.int64).T
    ends = np.cumsum(sizes)
    apart = (memory[1:] != memory[:-1]) | (address[1:] != address[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate([[True], apart]))
    for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(hosts)], strict=True):
        start, stop = int(ends[begin] - sizes[begin]), int(ends[end - 1])
        target[start:stop].copy_(hosts[begin].as_strided((stop - start,), (1,)), non_blocking=True)


def _drain(staged: torch.Tensor, batch: list[FrameCopy]) -> None:
    """Copy staged frames (frames, frame_bytes) to their places on the host."""
    start = 0
    for frames, host in batch:
        part = staged[start : start + len(frames)]
        host.view(part.shape).copy_(part, non_blocking=True)
        start += len(frames)


def _runs(frames: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) positions of the stretches of consecutive ids."""
    cuts = np.flatnonzero(np.diff(frames) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(frames)], strict=True))
