"""The copy engine on CUDA: pages cross the bus on one stream and spread into their frames on another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from pagedweight.runtime.frames import Arena
from pagedweight.runtime.transfer import FrameCopy, Ticket
from pagedweight.runtime.transfer_batch import DriverCopies, Pieces, pieces_of

# A half of the staging memory: long enough that launches cost little beside the copy, short enough that little is left
# to spread once the last bytes have crossed the bus.
_STAGING_BYTES = 32 * 2**20
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
        self.address = rows.data_ptr()
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
        self._copies = DriverCopies()
        self._staging_frames = max(1, min(staging_bytes // arena.frame_bytes, arena.frames))
        self._half_bytes = self._staging_frames * arena.frame_bytes
        self._halves: list[_Half] = []

    def copy_in(self, copies: Sequence[FrameCopy]) -> Ticket:
        began = torch.cuda.Event(enable_timing=True)
        began.record(self._copy_stream)
        if not copies:
            return _EventTicket(self._copy_stream, began=began)
        hosts, pieces = self._pieces(copies)
        with torch.cuda.device(self._device), _settled(self._copy_stream, self._spread_stream):
            ids = self._spread_ids(copies)
            batch_of = pieces.start // self._half_bytes
            for number, part in enumerate(ids.split(self._staging_frames)):
                half, batch = self._next_half(), batch_of == number
                self._copy_stream.wait_event(half.free)
                self._copies.copy_pieces(half.address, Pieces(*(values[batch] for values in pieces)), self._copy_stream)
                self._spread_stream.wait_stream(self._copy_stream)
                with torch.cuda.stream(self._spread_stream):
                    self._words.index_copy_(0, part, half.rows[: len(part)])
                half.free.record(self._spread_stream)
            return _EventTicket(self._spread_stream, hosts, began)

    def copy_out(self, copies: Sequence[FrameCopy]) -> Ticket:
        with _settled(self._copy_stream, self._spread_stream):
            for frames, host in copies:
                ids = self._spread_ids([FrameCopy(frames, host)])
                for part, target in zip(ids.split(self._staging_frames), host.split(self._half_bytes), strict=True):
                    half = self._next_half()
                    self._spread_stream.wait_event(half.free)
                    with torch.cuda.stream(self._spread_stream):
                        torch.index_select(self._words, 0, part, out=half.rows[: len(part)])
                        target.view(_WORD).view(len(part), -1).copy_(half.rows[: len(part)], non_blocking=True)
                    half.free.record(self._spread_stream)
            return _EventTicket(self._spread_stream, (host for _, host in copies))

    def fence(self) -> Ticket:
        return _EventTicket(torch.cuda.current_stream(self._device))

    def write_now(self, copies: Sequence[FrameCopy]) -> None:
        hosts = [host for _, host in copies]
        locked = _page_locked(hosts, _places(hosts)[:, 0])
        for (frames, host), is_locked in zip(copies, locked, strict=True):
            pieces = (host if is_locked else host.pin_memory()).view(len(frames), -1)
            for start, stop in _runs(frames):
                first = int(frames[start])
                self._rows[first : first + stop - start].copy_(pieces[start:stop], non_blocking=True)

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        ids = self._on_device(np.stack([sources, targets]))
        self._words.index_copy_(0, ids[1], self._words.index_select(0, ids[0]))

    def close(self) -> None:
        for stream in (self._copy_stream, self._spread_stream, torch.cuda.current_stream(self._device)):
            stream.synchronize()

    def _pieces(self, copies: Sequence[FrameCopy]) -> tuple[list[torch.Tensor], Pieces]:
        """The copies' bytes in page-locked memory, and where they lie."""
        hosts = [host for _, host in copies]
        places = _places(hosts)
        locked = _page_locked(hosts, places[:, 0])
        if not all(locked):
            hosts = [host if is_locked else host.pin_memory() for host, is_locked in zip(hosts, locked, strict=True)]
            places = _places(hosts)
        return hosts, pieces_of(*places.T, self._half_bytes)

    def _spread_ids(self, copies: Sequence[FrameCopy]) -> torch.Tensor:
        """Ids of the copies' frames, on a spread stream that comes after everything launched so far on the compute
        stream, which may still use those frames.
        """
        self._spread_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._spread_stream):
            return self._on_device(np.concatenate([frames for frames, _ in copies]))

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


def _places(hosts: list[torch.Tensor]) -> np.ndarray:
    """int64 (n, 3): the allocation that each tensor lies in, its address, its bytes."""
    places = [(host.untyped_storage().data_ptr(), host.data_ptr(), host.numel()) for host in hosts]
    return np.array(places, dtype=np.int64).reshape(-1, 3)


def _page_locked(hosts: list[torch.Tensor], memory: np.ndarray) -> list[bool]:
    """Which of the tensors are page-locked; the driver is asked once for each allocation."""
    allocations, first, of = np.unique(memory, return_index=True, return_inverse=True)
    locked = np.array([hosts[at].is_pinned() for at in first.tolist()], dtype=bool)
    return locked[of].tolist() if len(allocations) else []


def _runs(frames: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) positions of the stretches of consecutive ids."""
    cuts = np.flatnonzero(np.diff(frames) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(frames)], strict=True))
