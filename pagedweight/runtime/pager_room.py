"""Contiguous frames for tables: found, or made by moving what stands in the way to free frames elsewhere.

Frames move between forwards, ordered on the compute stream: a forward launched before has read them where they were,
one launched after the next publish finds them where they are. So nothing waits, and frames left behind are free.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagedweight.runtime.frames import FIXED_KV_OWNER, Arena, OutOfFrames, Owner, OwnerKind
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.transfer import TransferEngine

_SCAN_FRAMES = 8192
# Each costs the host a search, up to two milliseconds with 7,680 rows in 190,000 frames, and the device two small
# kernels. One serves all of a boundary's tables, where there is one so long.
_MOST_WINDOWS = 4
_MOST_PACKED = 32

KVMoved = Callable[[np.ndarray, np.ndarray], None]


class Room:
    """Runs of frames. What it moves: planes and tables at rest, and KV frames if their holder can follow them.

    kv_moved: called with the old and the new ids of KV frames; None leaves them where they are.
    """

    def __init__(self, table: PageTable, arena: Arena, engine: TransferEngine) -> None:
        self.kv_moved: KVMoved | None = None
        self.relocated_bytes = 0
        self._table = table
        self._arena = arena
        self._engine = engine
        self._windows_left = _MOST_WINDOWS
        self._coming_frames = 0
        self._busy: np.ndarray | None = None

    def renew(self, coming_frames: int) -> None:
        """A new boundary: as many windows as ever may be cleared. Until the next one no transfer begins or ends.

        coming_frames: what the tables that will ask for a run take together.
        """
        self._windows_left = _MOST_WINDOWS
        self._coming_frames = coming_frames
        self._busy = None

    def allocate_run(self, count: int, row: int) -> int:
        """First id of `count` contiguous frames for a table of the row. Raises OutOfFrames when fewer are free, when
        frames in transfer stand in every window, or when enough has been moved for one boundary.
        """
        owner = Owner(OwnerKind.TABLE, row)
        try:
            first = self._arena.allocate_run(count, owner)
        except OutOfFrames:
            if self._arena.free_frames < count or not self._windows_left:
                raise
            self._windows_left -= 1
            self._open(count)
            first = self._arena.allocate_run(count, owner)
        self._coming_frames -= count
        return first

    def _open(self, count: int) -> None:
        """Clear a window: for all the tables that are to come, else for this one, else once tables lie together."""
        coming = min(self._coming_frames, self._arena.free_frames)
        for size in (coming, count) if coming > count else (count,):
            window = self._cheapest_window(size)
            if window is not None:
                self._clear(window, size)
                return
        self._pack_tables(_MOST_PACKED)
        window = self._cheapest_window(count)
        if window is not None:
            self._clear(window, count)

    def allocate_window(self, count: int, origin: int) -> int:
        """First id of `count` contiguous frames for KV that stays in its place, a whole number of times `count` from
        the frame `origin` on. Raises OutOfFrames when fewer are free, or what cannot move now is in every such window.
        """
        self._busy = None
        if self._arena.free_frames >= count:
            window = self._cheapest_aligned(count, origin)
            if window is None:
                self._pack_tables(self._arena.frames)
                window = self._cheapest_aligned(count, origin)
            if window is not None:
                self._clear(window, count)
                self._arena.take_run(window, count, FIXED_KV_OWNER)
                return window
        raise OutOfFrames(
            f"a window of {count} frames of {self._arena.frame_bytes} bytes wanted; {self._arena.free_frames} frames "
            "are free, and no window can be emptied now"
        )

    def _cheapest_aligned(self, count: int, origin: int) -> int | None:
        """Where the fewest frames have to move; of several the highest, since tables want the low end."""
        windows = (self._arena.frames - origin) // count
        stop = origin + windows * count
        fixed = self._fixed(origin, stop).reshape(windows, count).any(axis=1)
        if fixed.all():
            return None
        taken = (self._arena.kinds[origin:stop] != OwnerKind.FREE).reshape(windows, count).sum(axis=1)
        taken[fixed] = count + 1
        return origin + (windows - 1 - int(taken[::-1].argmin())) * count

    def _cheapest_window(self, count: int) -> int | None:
        """Where the fewest frames have to move, near the low end; None when what cannot move is everywhere."""
        for start in range(0, self._arena.frames - count + 1, _SCAN_FRAMES):
            stop = min(self._arena.frames, start + _SCAN_FRAMES + count - 1)
            passable = np.flatnonzero(_windows(self._fixed(start, stop), count) == 0)
            if len(passable):
                taken = _windows(self._arena.kinds[start:stop] != OwnerKind.FREE, count)
                return start + int(passable[taken[passable].argmin()])
        return None

    def _fixed(self, start: int, stop: int) -> np.ndarray:
        """bool, which frames cannot move now: tables, pages of rows in transfer, and KV that nobody would follow."""
        kinds, rows = self._arena.kinds[start:stop], self._arena.owner_rows[start:stop]
        if self._busy is None:
            self._busy = self._table.busy()
        kv_stays = (rows == FIXED_KV_OWNER.row) | (self.kv_moved is None)
        return (
            (kinds == OwnerKind.TABLE)
            | ((kinds == OwnerKind.PLANE) & self._busy[rows])
            | ((kinds == OwnerKind.KV) & kv_stays)
        )

    def _clear(self, first: int, count: int) -> None:
        window = np.arange(first, first + count)
        leaving = window[self._arena.kinds[window] != OwnerKind.FREE]
        if len(leaving):
            self._relocate(leaving, self._arena.highest_free(len(leaving), outside=(first, first + count)))

    def _pack_tables(self, most: int) -> None:
        """Tables in use move to the low end, one after the other, as far as what cannot move lets them; at most so
        many, and the rest at later boundaries."""
        edge = 0
        for first, count in self._table.table_runs():
            place = first if first == edge else self._open_place(edge, first, count)
            if place < first:
                self._exchange(first, place, count)
                most -= 1
                if not most:
                    return
            edge = place + count

    def _open_place(self, edge: int, first: int, count: int) -> int:
        """The lowest start from `edge` to `first` where a run that now begins at `first` could be."""
        fixed = self._fixed(edge, first + count)
        fixed[first - edge :] = False
        return edge + int(np.flatnonzero(_windows(fixed, count) == 0)[0])

    def _exchange(self, first: int, place: int, count: int) -> None:
        """The run at `first` goes to `place`; what is there goes to the frames that the run leaves."""
        run, target = np.arange(first, first + count), np.arange(place, place + count)
        entered, left = np.setdiff1d(target, run), np.setdiff1d(run, target)
        leaving = self._arena.kinds[entered] != OwnerKind.FREE
        self._relocate(np.concatenate([run, entered[leaving]]), np.concatenate([target, left[leaving]]))

    def _relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self._engine.relocate(sources, targets)
        kv = self._arena.kinds[sources] == OwnerKind.KV
        self._table.relocate(sources, targets)
        if kv.any():
            self.kv_moved(sources[kv], targets[kv])
        self._arena.move(sources, targets)
        self.relocated_bytes += len(sources) * self._arena.frame_bytes


def _windows(flags: np.ndarray, count: int) -> np.ndarray:
    """int64 (len(flags) - count + 1,), how many of each `count` neighbours are set."""
    sums = np.concatenate([[0], np.cumsum(flags)])
    return sums[count:] - sums[:-count]
