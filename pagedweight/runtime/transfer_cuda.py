"""The copy engine on CUDA: a copy stream beside the compute stream, ordered by events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from pagedweight.runtime.frames import Arena
from pagedweight.runtime.transfer import FrameCopy, Ticket

_STAGING_BYTES = 32 * 2**20


class _EventTicket:
    """An event on a stream; keeps what the copies read alive until it has passed."""

    def __init__(self, stream: torch.cuda.Stream, keep: Iterable[torch.Tensor] = ()) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._keep = tuple(keep)

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CudaEngine:
    """A copy stream beside the compute stream (the caller's current stream); nothing here waits for the device.

    Pages pass through a staging buffer on the device: a copy has a cost of its own (some 30 us) that frames of a few
    KiB cannot carry, so host bytes that lie together cross the bus together and one kernel spreads the frames.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._device = arena.memory.device
        self._copy_stream = torch.cuda.Stream(self._device)
        self._staging_frames = max(1, _STAGING_BYTES // arena.frame_bytes)
        self._staging: torch.Tensor | None = None

    def copy_in(self, copies: Sequence[FrameCopy]) -> Ticket:
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        keep = [_page_locked(host) for _, host in copies]
        sources = (FrameCopy(frames, host) for (frames, _), host in zip(copies, keep, strict=True))
        with _settled(self._copy_stream), torch.cuda.stream(self._copy_stream):
            for batch in self._batches(sources):
                staged = self._staged(batch)
                _fill(staged.view(-1), [copy.host for copy in batch])
                self._arena.rows.index_copy_(0, self._indices(batch), staged)
            return _EventTicket(self._copy_stream, keep)

    def copy_out(self, copies: Sequence[FrameCopy]) -> Ticket:
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with _settled(self._copy_stream), torch.cuda.stream(self._copy_stream):
            for batch in self._batches(copies):
                gathered = self._staged(batch)
                torch.index_select(self._arena.rows, 0, self._indices(batch), out=gathered)
                start = 0
                for frames, host in batch:
                    part = gathered[start : start + len(frames)]
                    host.view(part.shape).copy_(part, non_blocking=True)
                    start += len(frames)
            return _EventTicket(self._copy_stream, (host for _, host in copies))

    def fence(self) -> Ticket:
        return _EventTicket(torch.cuda.current_stream(self._device))

    def write_now(self, copies: Sequence[FrameCopy]) -> None:
        for frames, host in copies:
            self._copy_runs(FrameCopy(frames, _page_locked(host)))

    def close(self) -> None:
        self._copy_stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def _copy_runs(self, copy: FrameCopy) -> None:
        """One copy per run of frames, on the current stream."""
        host = copy.host.view(len(copy.frames), -1)
        for start, stop in _runs(copy.frames):
            first = int(copy.frames[start])
            self._arena.rows[first : first + stop - start].copy_(host[start:stop], non_blocking=True)

    def _batches(self, copies: Iterable[FrameCopy]) -> Iterable[list[FrameCopy]]:
        """Copies in groups that fit the staging buffer; one larger than it is a group of its own."""
        batch: list[FrameCopy] = []
        frames = 0
        for copy in copies:
            if batch and frames + len(copy.frames) > self._staging_frames:
                yield batch
                batch, frames = [], 0
            batch.append(copy)
            frames += len(copy.frames)
        if batch:
            yield batch

    def _staged(self, batch: list[FrameCopy]) -> torch.Tensor:
        """(frames of the batch, frame_bytes) of staging; the copy stream's order makes its reuse safe."""
        frames = sum(len(copy.frames) for copy in batch)
        if self._staging is None or len(self._staging) < frames:
            shape = (max(frames, self._staging_frames), self._arena.frame_bytes)
            self._staging = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return self._staging[:frames]

    def _indices(self, batch: list[FrameCopy]) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([copy.frames for copy in batch]))
        return ids.pin_memory().to(self._device, non_blocking=True)


@contextmanager
def _settled(stream: torch.cuda.Stream) -> Iterator[None]:
    """A failure half way through leaves copies running; they end before anyone may reuse the frames."""
    with ExitStack() as on_error:
        on_error.callback(stream.synchronize)
        yield
        on_error.pop_all()


def _page_locked(host: torch.Tensor) -> torch.Tensor:
    """The bytes in page-locked memory, so that the copy does not make the host wait for the device."""
    return host if host.is_pinned() else host.pin_memory()


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


def _runs(frames: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) positions of the stretches of consecutive ids."""
    cuts = np.flatnonzero(np.diff(frames) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(frames)], strict=True))
