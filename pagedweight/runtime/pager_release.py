"""Giving frames up: after the last reader has finished, and after a page without a host copy has been written back."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from pagedweight.runtime.frames import Arena
from pagedweight.runtime.pages import HostPages
from pagedweight.runtime.table import PageState, PageTable
from pagedweight.runtime.transfer import FrameCopy, Ticket, TransferEngine


@dataclass(frozen=True, slots=True, eq=False)
class _Release:
    """Frames that are free when every ticket is done: those of pages that leave, and table frames out of use."""

    rows: np.ndarray
    table_frames: np.ndarray
    bytes: int
    tickets: list[Ticket]
    written_back: list[tuple[int, int]]


class Releases:
    """Collects what a publish took away from the kernels and frees it in time."""

    def __init__(self, table: PageTable, arena: Arena, host: HostPages, engine: TransferEngine) -> None:
        self.released_bytes = 0
        self.written_back_bytes = 0
        self._table = table
        self._arena = arena
        self._host = host
        self._engine = engine
        self._rows: list[np.ndarray] = []
        self._table_frames: list[np.ndarray] = []
        self._started: list[_Release] = []

    @property
    def bytes(self) -> int:
        """Bytes of frames that will be free once their last reader has finished."""
        return sum(release.bytes for release in self._started)

    @property
    def idle(self) -> bool:
        return not (self._started or self._rows or self._table_frames)

    def add(self, rows: np.ndarray, table_frames: np.ndarray) -> None:
        """Rows whose pages above q leave, and table frames out of use, once published."""
        self._rows.append(rows)
        self._table_frames.append(table_frames)

    def start(self) -> None:
        """After a publish: fence the forwards that may still read, and write back pages that have no other copy."""
        if not (self._rows or self._table_frames):
            return
        rows, table_frames = np.concatenate(self._rows), np.concatenate(self._table_frames)
        at, planes = np.nonzero(self._table.state[rows] == PageState.TO_CPU)
        leaving = rows[at]
        frames = int(self._table.sizes.plane_frames[leaving].sum()) + len(table_frames)
        pages = zip(leaving.tolist(), planes.tolist(), strict=True)
        written_back = [page for page in pages if not self._host.has(*page)]
        # The fence first: if there is none, no copy is left behind that nobody waits for.
        tickets = [self._engine.fence(), *self._write_back(written_back)]
        self._rows.clear()
        self._table_frames.clear()
        self._started.append(_Release(rows, table_frames, frames * self._arena.frame_bytes, tickets, written_back))

    def collect(self, *, wait: bool = False) -> None:
        """Free what nobody reads any more. wait: wait until that is everything that has been started."""
        for release in list(self._started):
            with ExitStack() as on_error:
                on_error.callback(self._try_again, release)
                finished = _finished(release.tickets, wait)
                on_error.pop_all()
            if finished:
                self._free(release)

    def _write_back(self, pages: list[tuple[int, int]]) -> list[Ticket]:
        copies = [FrameCopy(self._table.page_frames(*page), self._host.reserve(*page)) for page in pages]
        return [self._engine.copy_out(copies)] if copies else []

    def _free(self, release: _Release) -> None:
        for page in release.written_back:
            room = self._host.reserve(*page)
            self._host.store(*page, room)
            self.written_back_bytes += room.numel()
        self._arena.free(np.concatenate([self._table.end_move(release.rows), release.table_frames]))
        self._started.remove(release)
        self.released_bytes += release.bytes

    def _try_again(self, release: _Release) -> None:
        """The pages are still on the device, and only there: the next start writes them back anew."""
        self._started.remove(release)
        self.add(release.rows, release.table_frames)


def _finished(tickets: list[Ticket], wait: bool) -> bool:
    if wait:
        for ticket in tickets:
            ticket.wait()
    return all(ticket.done() for ticket in tickets)
