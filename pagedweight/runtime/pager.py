"""Carries transitions out: an offload lowers before it moves, a reload moves before it raises.

A failed copy or a lack of frames leaves every page state true and every frame owned; the error goes to the caller,
and the next boundary may try again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from pagedweight.runtime.frame_ids import parted
from pagedweight.runtime.frames import Arena, OutOfFrames
from pagedweight.runtime.pager_load import Loads
from pagedweight.runtime.pager_release import Releases
from pagedweight.runtime.pager_room import KVMoved
from pagedweight.runtime.pages import HostPages
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import Transition
from pagedweight.runtime.transfer import FrameCopy, TransferEngine


class Moves(NamedTuple):
    """What has been moved since the start.

    deferred: raises put off for want of room. cancelled: loads given up. relocated: moved within the arena.
    loading_seconds: what loads took, from the first byte's launch to the last one's arrival. stalled_seconds: how long
    boundaries and allocations have waited for the device, so that bytes became free; set_bits is not counted.
    """

    lowered_rows: int
    raised_rows: int
    deferred_rows: int
    cancelled_rows: int
    loaded_bytes: int
    released_bytes: int
    written_back_bytes: int
    relocated_bytes: int
    loading_seconds: float
    stalled_seconds: float

    def __str__(self) -> str:
        return (
            f"moved so far {self.lowered_rows} rows down for {self.released_bytes} bytes, {self.raised_rows} up for "
            f"{self.loaded_bytes}; {self.deferred_rows} raises put off, {self.cancelled_rows} given up; waited "
            f"{self.stalled_seconds:.3f} s for the device"
        )

    @property
    def loaded_bytes_per_second(self) -> float:
        """The rate at which pages have come back; 0 before the first."""
        return self.loaded_bytes / self.loading_seconds if self.loading_seconds else 0.0


class Pager:
    """Moves pages for one table. Only settle, rescue and collect(wait=True) wait for the device."""

    def __init__(self, table: PageTable, arena: Arena, host: HostPages, engine: TransferEngine) -> None:
        self._table = table
        self._arena = arena
        self._host = host
        self._engine = engine
        self._loads = Loads(table, arena, host, engine)
        self._releases = Releases(table, arena, host, engine)
        self._lowered_rows = 0
        self._raised_rows = 0
        self._stalled_seconds = 0.0

    def follow_kv(self, moved: KVMoved) -> None:
        """From now on KV frames may be moved within the arena, at starts; `moved` is told the old ids and the new."""
        self._loads.room.kv_moved = moved

    def allocate_window(self, frames: int, origin: int) -> int:
        """First id of `frames` contiguous frames for KV that stays in its place, a whole number of times `frames` from
        `origin` on; what is there moves, between two forwards. Raises OutOfFrames when too few are free.
        """
        try:
            window = self._loads.room.allocate_window(frames, origin)
        except OutOfFrames:
            if self._arena.free_frames < frames or self.idle:
                raise
            # Pages on their way stand in every window.
            self._release_now()
            self._loads.cancel()
            window = self._loads.room.allocate_window(frames, origin)
        self._table.publish()
        return window

    @property
    def loading_bytes(self) -> int:
        """Bytes on their way to the device."""
        return self._loads.bytes

    @property
    def releasing_bytes(self) -> int:
        """Bytes of frames that will be free once their last reader has finished."""
        return self._releases.bytes

    @property
    def idle(self) -> bool:
        return self._loads.idle and self._releases.idle

    @property
    def moves(self) -> Moves:
        loads, releases = self._loads, self._releases
        return Moves(
            self._lowered_rows,
            self._raised_rows,
            loads.deferred_rows,
            loads.cancelled_rows,
            loads.loaded_bytes,
            releases.released_bytes,
            releases.written_back_bytes,
            loads.room.relocated_bytes,
            loads.loading_seconds,
            self._stalled_seconds,
        )

    def collect(self, *, wait: bool = False) -> None:
        """Take in what has finished: free released frames, note landed pages. wait: let everything finish first."""
        began = time.perf_counter()
        self._take_in(wait=wait)
        if wait:
            self._stalled_seconds += time.perf_counter() - began

    def _take_in(self, *, wait: bool) -> None:
        self._releases.collect(wait=wait)
        self._loads.collect(wait=wait)

    def raise_landed(self) -> None:
        """Commit the higher width of rows whose pages have landed; the caller publishes."""
        rows = self._loads.take_landed()
        if len(rows):
            self._table.end_move(rows)
            self._releases.add(rows[:0], self._table.commit_raise(rows))
            self._raised_rows += len(rows)

    def lower(self, transitions: Iterable[Transition]) -> None:
        """Commit the lowerings among the transitions; the caller publishes, then starts."""
        lowering = self._checked([t for t in transitions if t.lowers])
        if not lowering:
            return
        rows, bits = np.array([(t.row, t.to_bits) for t in lowering], dtype=np.int64).T
        with ExitStack() as on_error:
            on_error.callback(self._fall_to_floor, rows)
            self._engine.write_now(self._slot_writes(rows, bits))
            on_error.pop_all()
        self._commit_lower(rows, bits)

    def start(self, transitions: Iterable[Transition] = ()) -> None:
        """Begin what follows a publish: release what no new forward can read, and load for the raises."""
        assert self._table.published
        self._releases.start()
        raising = self._checked([t for t in transitions if not t.lowers])
        if raising:
            self._loads.start(raising)

    def settle(self) -> None:
        """Wait for everything in flight, and leave nothing half done."""
        while not self.idle:
            self._take_in(wait=True)
            self.raise_landed()
            self._table.publish()
            self.start()

    def rescue(self, wanted_bytes: int, order: Sequence[int]) -> int:
        """Make wanted_bytes free at once, and wait until they are; returns the free bytes, which may be fewer.

        First what is on its way out, then loads are given up, then rows drop straight to the floor in the given
        order, which needs nothing from the host.
        """
        began = time.perf_counter()
        try:
            self._rescue(wanted_bytes, order)
        finally:
            self._stalled_seconds += time.perf_counter() - began
        return self._arena.free_bytes

    def _rescue(self, wanted_bytes: int, order: Sequence[int]) -> None:
        self._table.publish()
        self._release_now()
        if self._arena.free_bytes < wanted_bytes:
            self._loads.cancel()
        if self._arena.free_bytes < wanted_bytes:
            self.lower(self._drops_to_floor(wanted_bytes - self._arena.free_bytes, order))
            self._table.publish()
            self._release_now()

    def _release_now(self) -> None:
        self._releases.start()
        self._releases.collect(wait=True)

    def _drops_to_floor(self, missing_bytes: int, order: Sequence[int]) -> list[Transition]:
        seen = self._table.snapshot()
        held = seen.bytes[np.arange(len(seen.committed)), self._table.width_index(seen.committed)]
        drops = []
        for row in order:
            if missing_bytes <= 0:
                break
            if seen.busy[row] or seen.committed[row] <= self._table.floor:
                continue
            released = int(held[row] - seen.bytes[row, 0])
            drops.append(Transition(int(row), int(seen.committed[row]), self._table.floor, released))
            missing_bytes -= released
        return drops

    def _checked(self, transitions: list[Transition]) -> list[Transition]:
        """The transitions, or ValueError, with nothing moved, when a row comes twice or is not as the plan says."""
        if not transitions:  # nearly every boundary's
            return transitions
        rows = np.array([t.row for t in transitions], dtype=np.int64)
        if len(set(rows.tolist())) != len(rows):
            raise ValueError("a plan names a row twice; give each row one transition")
        for t, committed, desired in zip(
            transitions, self._table.committed[rows].tolist(), self._table.desired[rows].tolist(), strict=True
        ):
            if not t.from_bits == committed == desired:
                raise ValueError(
                    f"row {t.row} is at {committed} bits on its way to {desired}; "
                    f"the plan moves it from {t.from_bits} to {t.to_bits}: plan again"
                )
        return transitions

    def _fall_to_floor(self, rows: np.ndarray) -> None:
        """A slot half overwritten serves no width, so kernels are sent to the floor's table at once."""
        self._commit_lower(rows, np.full_like(rows, self._table.floor))
        self._table.publish()

    def _slot_writes(self, rows: np.ndarray, bits: np.ndarray) -> list[FrameCopy]:
        """Tables of lower widths over the prefixes of the rows' slots; the floor's is there already."""
        above_floor = bits > self._table.floor
        rows, bits = rows[above_floor], bits[above_floor]
        frames = parted(self._table.slot_run[rows], self._table.table_frames(rows, bits))
        tables = map(self._host.table, rows.tolist(), bits.tolist())
        return list(map(FrameCopy, frames, tables))

    def _commit_lower(self, rows: np.ndarray, bits: np.ndarray) -> None:
        self._table.want(rows, bits)
        table_frames = self._table.commit_lower(rows)
        self._table.begin_move_out(rows)
        self._releases.add(rows, table_frames)
        self._lowered_rows += len(rows)
