"""The copy engine on CUDA: pages cross the bus on one stream and spread into their frames on another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from pagedweight.runtime.forks import LeftInForks
from pagedweight.runtime.frames import Arena
from pagedweight.runtime.transfer import FrameCopy, Ticket
from pagedweight.runtime.transfer_batch import DriverCopies, Pieces, pieces_of
from pagedweight.runtime.transfer_staging import WORD, Staging

# A half of the staging memory: long enough that launches cost little beside the copy (0.15 ms), short enough that
# little is left to spread once the last bytes have crossed the bus, and little memory is missing elsewhere.
_STAGING_BYTES = 8 * 2**20
# A piece keeps a copy engine 2 to 3 us longer than its bytes take: two at a time hide that behind one another.
_COPY_STREAMS = 2
# Tables that lowered widths wait for: some 90 KiB each, a hundred at a boundary.
_WRITING_BYTES = 8 * 2**20
# Rows of the page table and frame ids that cross beside a forward: under 1 KiB for each row that a boundary moves. What
# is larger, in itself or beside its arena, would keep memory from the allocator for long.
_UPLOAD_BYTES, _LEAST_UPLOADS = 2**16, 4096


class _EventTicket(LeftInForks):
    """An event on a stream; keeps what the copies read alive until it has passed."""

    def __init__(
        self, stream: torch.cuda.Stream, keep: Iterable[torch.Tensor] = (), began: torch.cuda.Event | None = None
    ) -> None:
        super().__init__()
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


class CudaEngine:
    """Two streams beside the compute stream (the caller's current stream); nothing here waits for the device.

    Pages pass through a staging buffer on the device: a copy has a cost of its own that frames of a few KiB cannot
    carry, so host bytes that lie together cross the bus together and one kernel spreads the frames, while the next
    bytes already cross into the other half. What is written for the next forward has a buffer and a stream of its own:
    behind pages on their way in it would hold that forward up.
    """

    def __init__(
        self,
        arena: Arena,
        staging_bytes: int = _STAGING_BYTES,
        copy_streams: int = _COPY_STREAMS,
        *,
        batched: bool = True,
    ) -> None:
        self._device = arena.memory.device
        self._words = arena.rows.view(WORD)
        self._copy_streams = [torch.cuda.Stream(self._device) for _ in range(copy_streams)]
        self._spread_stream = torch.cuda.Stream(self._device)
        self._write_stream = torch.cuda.Stream(self._device)
        self._copies = DriverCopies(batched=batched)
        self._staging = Staging(arena, staging_bytes)
        self._writing = Staging(arena, _WRITING_BYTES)
        self._written: list[_EventTicket] = []
        self._most_upload_bytes = min(_UPLOAD_BYTES, arena.memory.numel() // _LEAST_UPLOADS)

    def copy_in(self, copies: Sequence[FrameCopy]) -> Ticket:
        began = torch.cuda.Event(enable_timing=True)
        if not copies:
            began.record(self._spread_stream)
            return _EventTicket(self._spread_stream, began=began)
        hosts, pieces = self._pieces(copies, self._staging)
        with torch.cuda.device(self._device), _settled(*self._copy_streams, self._spread_stream):
            # Everything launched so far on the compute stream may still use the frames.
            self._spread_stream.wait_stream(torch.cuda.current_stream(self._device))
            ids = self._on_device(_frames_of(copies), self._spread_stream)
            self._cross(ids, pieces, self._staging, self._copy_streams, self._spread_stream, began)
            return _EventTicket(self._spread_stream, hosts, began)

    def copy_out(self, copies: Sequence[FrameCopy]) -> Ticket:
        with _settled(self._spread_stream):
            self._spread_stream.wait_stream(torch.cuda.current_stream(self._device))
            for frames, host in copies:
                ids = self._on_device(frames, self._spread_stream)
                parts = host.split(self._staging.half_bytes)
                for part, target in zip(ids.split(self._staging.half_frames), parts, strict=True):
                    half = self._staging.next_half([self._spread_stream])
                    with torch.cuda.stream(self._spread_stream):
                        torch.index_select(self._words, 0, part, out=half.rows[: len(part)])
                        target.view(WORD).view(len(part), -1).copy_(half.rows[: len(part)], non_blocking=True)
                    half.free.record(self._spread_stream)
            return _EventTicket(self._spread_stream, (host for _, host in copies))

    def fence(self) -> Ticket:
        return _EventTicket(torch.cuda.current_stream(self._device))

    def write_now(self, copies: Sequence[FrameCopy]) -> None:
        if not copies:
            return
        self._written = [ticket for ticket in self._written if not ticket.done()]
        compute = torch.cuda.current_stream(self._device)
        hosts, pieces = self._pieces(copies, self._writing)
        with torch.cuda.device(self._device), _settled(self._write_stream, compute):
            self._cross(self.upload(_frames_of(copies)), pieces, self._writing, [self._write_stream], compute)
            self._written.append(_EventTicket(self._write_stream, hosts))

    def upload(self, values: np.ndarray) -> torch.Tensor:
        compute = torch.cuda.current_stream(self._device)
        if values.nbytes > self._most_upload_bytes:
            return self._on_device(values, compute)
        # Crosses beside the forward that is running: behind it, the next one would wait for the bus.
        values_there = self._on_device(values, self._write_stream)
        compute.wait_stream(self._write_stream)
        values_there.record_stream(compute)
        return values_there

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        ids = self.upload(np.stack([sources, targets]))
        self._words.index_copy_(0, ids[1], self._words.index_select(0, ids[0]))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        streams = *self._copy_streams, self._spread_stream, self._write_stream
        for stream in (*streams, torch.cuda.current_stream(self._device)):
            stream.synchronize()

    def _cross(
        self,
        ids: torch.Tensor,
        pieces: Pieces,
        staging: Staging,
        copying: Sequence[torch.cuda.Stream],
        spreading: torch.cuda.Stream,
        began: torch.cuda.Event | None = None,
    ) -> None:
        """Host bytes to a half of the staging memory on streams that share its pieces, from there to the frames `ids`
        on another; began: recorded where the first bytes start."""
        batch_of = pieces.start // staging.half_bytes
        for number, part in enumerate(ids.split(staging.half_frames)):
            half, batch = staging.next_half(copying), np.flatnonzero(batch_of == number)
            if began is not None and not number:
                began.record(copying[0])
            for at, stream in enumerate(copying[: len(batch)]):
                shared = Pieces(*(values[batch[at :: len(copying)]] for values in pieces))
                self._copies.copy_pieces(half.address - number * staging.half_bytes, shared, stream)
                spreading.wait_stream(stream)
            with torch.cuda.stream(spreading):
                self._words.index_copy_(0, part, half.rows[: len(part)])
            half.free.record(spreading)

    def _pieces(self, copies: Sequence[FrameCopy], staging: Staging) -> tuple[list[torch.Tensor], Pieces]:
        """The copies' bytes in page-locked memory, and where they lie."""
        hosts = [host for _, host in copies]
        places = _places(hosts)
        locked = _page_locked(hosts, places[:, 0])
        if not all(locked):
            hosts = [host if is_locked else host.pin_memory() for host, is_locked in zip(hosts, locked, strict=True)]
            places = _places(hosts)
        return hosts, pieces_of(*places.T, staging.half_bytes)

    def _on_device(self, frames: np.ndarray, stream: torch.cuda.Stream) -> torch.Tensor:
        """Frame ids on the device, there for what comes next on the stream."""
        with torch.cuda.stream(stream):
            return torch.from_numpy(frames).pin_memory().to(self._device, non_blocking=True)


@contextmanager
def _settled(*streams: torch.cuda.Stream) -> Iterator[None]:
    """A failure half way leaves copies running; they end before anyone may reuse the frames."""
    with ExitStack() as on_error:
        for stream in streams:
            on_error.callback(stream.synchronize)
        yield
        on_error.pop_all()


def _frames_of(copies: Sequence[FrameCopy]) -> np.ndarray:
    return np.concatenate([frames for frames, _ in copies])


def _places(hosts: list[torch.Tensor]) -> np.ndarray:
    """int64 (n, 3): the allocation that each tensor lies in, its address, its bytes."""
    places = [(host.untyped_storage().data_ptr(), host.data_ptr(), host.numel()) for host in hosts]
    return np.array(places, dtype=np.int64).reshape(-1, 3)


def _page_locked(hosts: list[torch.Tensor], memory: np.ndarray) -> list[bool]:
    """Which of the tensors are page-locked; the driver is asked once for each allocation."""
    allocations, first, of = np.unique(memory, return_index=True, return_inverse=True)
    locked = np.array([hosts[at].is_pinned() for at in first.tolist()], dtype=bool)
    return locked[of].tolist() if len(allocations) else []
