"""Bringing pages in: frames first, then one batch of copies; nothing is visible to kernels until it has landed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedweight.runtime.frame_ids import parted, split
from pagedweight.runtime.frames import Arena, OutOfFrames, Owner, OwnerKind
from pagedweight.runtime.pager_room import Room
from pagedweight.runtime.pages import HostPages
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import Transition
from pagedweight.runtime.transfer import FrameCopy, Ticket, TransferEngine


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """Rows on their way in with one batch of copies; compared by identity."""

    rows: np.ndarray
    bytes: int
    ticket: Ticket


class _Run(NamedTuple):
    """Where a row's new table goes, and the width it is for."""

    row: int
    bits: int
    first_frame: int


class _Placed(NamedTuple):
    """Rows on their way up to `bits`: how many pages each lacks, where its table goes, and its pages' frames, which
    come row by row and page by page."""

    rows: np.ndarray
    bits: np.ndarray
    pages: np.ndarray
    first_frames: np.ndarray
    frames: np.ndarray


class Loads:
    """Rows on their way to a higher width."""

    def __init__(self, table: PageTable, arena: Arena, host: HostPages, engine: TransferEngine) -> None:
        self.room = Room(table, arena, engine)
        self.loaded_bytes = 0
        self.loading_seconds = 0.0
        self.deferred_rows = 0
        self.cancelled_rows = 0
        self._table = table
        self._arena = arena
        self._host = host
        self._engine = engine
        self._started: list[_Load] = []
        self._landed: list[np.ndarray] = []

    @property
    def bytes(self) -> int:
        """Bytes on their way in."""
        return sum(load.bytes for load in self._started)

    @property
    def idle(self) -> bool:
        return not (self._started or self._landed)

    def start(self, raising: Sequence[Transition]) -> None:
        """Allocate frames and copy in, one batch. A row whose table finds no run rises as far as one does; rows for
        which there is no room at all now are left as they are."""
        placed = self._allocate(raising)
        if placed is None:
            return
        copies = self._copies(placed)
        with ExitStack() as on_error:
            on_error.callback(self._give_up, placed.rows)
            ticket = self._engine.copy_in(copies)
            on_error.pop_all()
        self._started.append(_Load(placed.rows, sum(copy.host.numel() for copy in copies), ticket))

    def collect(self, *, wait: bool = False) -> None:
        """Note what has landed. A failed copy gives its rows' frames back, leaves them as they were, and raises."""
        for load in list(self._started):
            with ExitStack() as on_error:
                on_error.callback(self._drop, load)
                if wait:
                    load.ticket.wait()
                landed = load.ticket.done()
                on_error.pop_all()
            if landed:
                self._started.remove(load)
                self._landed.append(load.rows)
                self.loaded_bytes += load.bytes
                self.loading_seconds += load.ticket.seconds()

    def take_landed(self) -> np.ndarray:
        """int64 rows whose pages are in place and may be raised now; each is handed out once."""
        rows = np.concatenate([np.empty(0, dtype=np.int64), *self._landed])
        self._landed.clear()
        return rows

    def cancel(self) -> None:
        """Give up every load: wait for its copies, then free their frames, which no kernel has seen."""
        self.collect(wait=True)
        rows = self.take_landed()
        self.cancelled_rows += len(rows)
        self._give_up(rows)

    def _allocate(self, raising: Sequence[Transition]) -> _Placed | None:
        """Frames for as many rows as fit, in order; None when there is no room for any."""
        rows, bits = np.array([(t.row, t.to_bits) for t in raising], dtype=np.int64).T
        needed = (bits - self._table.committed[rows]) * self._table.sizes.plane_frames[rows]
        fits = np.cumsum(needed + self._table.table_frames(rows, bits)) <= self._arena.free_frames
        runs: list[_Run] = []
        with ExitStack() as on_error:
            on_error.callback(self._free_runs, runs)
            self._place_tables(rows[fits], bits[fits], runs)
            if runs:
                rows, bits, first_frames = np.array(runs, dtype=np.int64).T
                pages = bits - self._table.committed[rows]
                counts = pages * self._table.sizes.plane_frames[rows]
                frames = self._arena.allocate(int(counts.sum()), Owner(OwnerKind.PLANE, np.repeat(rows, counts)))
            on_error.pop_all()
        self.deferred_rows += len(raising) - len(runs)
        if not runs:
            return None
        self._table.want(rows, bits)
        self._table.begin_move_in(rows, frames, first_frames)
        return _Placed(rows, bits, pages, first_frames, frames)

    def _place_tables(self, rows: np.ndarray, bits: np.ndarray, runs: list[_Run]) -> None:
        """Frames for the new tables, one by one. Where others had to move, kernels learn of it at once."""
        self.room.renew(int(self._table.table_frames(rows, bits).sum()))
        with ExitStack() as afterwards:
            afterwards.callback(self._table.publish)
            for row, wanted in zip(rows.tolist(), bits.tolist(), strict=True):
                run = self._widest_run(row, wanted)
                if run is not None:
                    runs.append(run)

    def _free_runs(self, runs: list[_Run]) -> None:
        for row, bits, first in runs:
            self._arena.free(np.arange(first, first + self._table.table_frames(row, bits)))

    def _widest_run(self, row: int, bits: int) -> _Run | None:
        """Frames for a table of these bits, or of the most bits for which there are frames that lie together."""
        for width in reversed(self._table.sizes.widths):
            if self._table.committed[row] < width <= bits:
                try:
                    return _Run(row, width, self.room.allocate_run(int(self._table.table_frames(row, width)), row))
                except OutOfFrames:
                    continue
        return None

    def _copies(self, placed: _Placed) -> list[FrameCopy]:
        """Each row's table, then its pages."""
        rows, bits, pages, first_frames, frames = placed
        tables = parted(first_frames, self._table.table_frames(rows, bits))
        of_pages = iter(split(frames, np.repeat(self._table.sizes.plane_frames[rows], pages)))
        copies = []
        for row, width, count, table_frames in zip(rows.tolist(), bits.tolist(), pages.tolist(), tables, strict=True):
            copies.append(FrameCopy(table_frames, self._host.table(row, width)))
            for plane in range(width - count, width):
                page = self._host.page(row, plane)
                assert page is not None, (row, plane)
                copies.append(FrameCopy(next(of_pages), page))
        return copies

    def _drop(self, load: _Load) -> None:
        self._started.remove(load)
        self._give_up(load.rows)

    def _give_up(self, rows: np.ndarray) -> None:
        self._arena.free(self._table.end_move(rows, landed=False))
