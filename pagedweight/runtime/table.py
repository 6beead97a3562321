"""The weight page table: the only place that changes committed and desired widths, page states and device tables.

The order of verbs is the contract. Lowering: want, (new table written into the slot), commit_lower, begin_move,
publish, and end_move once the last reader has finished. Raising: want, begin_move, (copies land), end_move,
commit_raise, publish.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
import torch

from pagedweight.layout import BlockTables, Layout
from pagedweight.runtime.frame_ids import replaced, run_frames
from pagedweight.runtime.frames import Arena, Owner, OwnerKind
from pagedweight.runtime.pages import PageSizes
from pagedweight.runtime.table_view import TableSnapshot

NO_FRAME = -1
Upload = Callable[[np.ndarray], torch.Tensor]


class PageState(enum.IntEnum):
    """Where a page is. A page on its way out still has its frames; one on its way in has them already."""

    CPU = 0
    GPU = 1
    TO_GPU = 2
    TO_CPU = 3


# As plain numbers: an enum member costs more to look up than to compare a whole array with.
_CPU, _GPU, _TO_GPU, _TO_CPU = map(int, PageState)


class PageTable:
    """R rows, at first with nothing on the device and committed width 0; the first raise of a row is to the floor.

    tables: what kernels read; addresses stay fixed for life and only `publish` writes there.
    upload: the transfer engine's.
    step: boundaries so far. version: changes whenever a committed width does.
    """

    def __init__(self, layout: Layout, sizes: PageSizes, arena: Arena, upload: Upload) -> None:
        rows, planes, most_frames = layout.rows, sizes.planes, int(sizes.plane_frames.max())
        self.sizes = sizes
        self.committed = np.zeros(rows, dtype=np.int64)
        self.desired = np.zeros(rows, dtype=np.int64)
        self.state = np.full((rows, planes), _CPU, dtype=np.uint8)
        self.frames = np.full((rows, planes, most_frames), NO_FRAME, dtype=np.int64)
        self.floor_run = np.full(rows, NO_FRAME, dtype=np.int64)
        self.slot_run = np.full(rows, NO_FRAME, dtype=np.int64)
        self._incoming_run = np.full(rows, NO_FRAME, dtype=np.int64)
        self._changed_at = np.zeros(rows, dtype=np.int64)
        self.step = 0
        self.version = 0
        self._dirty = np.zeros(rows, dtype=bool)
        # What every boundary asks is kept beside the arrays, whose scans would cost more than all the rest of it.
        self._last_changed_at, self._any_dirty = 0, False
        self._arena = arena
        self._upload = upload
        self._planes = np.arange(planes)
        self._identity = _identities(layout)
        self._bytes = sizes.resident_bytes()
        self._table_frames = np.zeros((rows, planes + 1), dtype=np.int64)
        self._table_frames[:, list(sizes.widths)] = sizes.table_frames
        for constant in (*self._identity, self._bytes):
            constant.flags.writeable = False
        self.tables = _empty_tables(rows, planes, most_frames, arena.memory)

    @property
    def floor(self) -> int:
        return self.sizes.widths[0]

    @property
    def at_parent_width(self) -> bool:
        """Whether no row can be raised further."""
        return bool((self.desired == self.sizes.planes).all())

    @property
    def steps_at_rest(self) -> int:
        """Boundaries since any committed width changed."""
        return self.step - self._last_changed_at

    @property
    def published(self) -> bool:
        """Whether kernels see every committed width."""
        return not self._any_dirty

    def slot_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of the tables in use above the floor's."""
        return self._slot_frames(rows) * self.sizes.frame_bytes

    def width_index(self, bits: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.sizes.widths, bits)

    def table_frames(self, rows: np.ndarray | int, bits: np.ndarray | int) -> np.ndarray:
        """Frames of the tables of these widths."""
        return self._table_frames[rows, bits]

    def page_frames(self, row: int, plane: int) -> np.ndarray:
        """int64 ids of the frames of a page that has frames."""
        return self.frames[row, plane, : self.sizes.plane_frames[row]]

    def busy(self) -> np.ndarray:
        """bool (R,), rows with a page in transfer."""
        # Few pages are: looking for them is ten times as fast as reducing every row.
        moving = np.zeros(len(self.state), dtype=bool)
        moving[np.flatnonzero(self.state >= _TO_GPU) // self.state.shape[1]] = True
        return moving

    def advance(self) -> None:
        """One boundary has passed."""
        self.step += 1

    def snapshot(self) -> TableSnapshot:
        return TableSnapshot(
            self.sizes.widths,
            self.committed.copy(),
            self.desired.copy(),
            self._bytes,
            self.busy(),
            self.step - self._changed_at,
            *self._identity,
        )

    def want(self, rows: np.ndarray, bits: np.ndarray) -> None:
        """Set d of rows that are at rest."""
        assert np.isin(bits, self.sizes.widths).all(), bits
        assert not self.busy()[rows].any(), rows
        self.desired[rows] = bits

    def commit_lower(self, rows: np.ndarray) -> np.ndarray:
        """q becomes d, which is lower; the new width's table is in place. Returns the table frames no longer used."""
        old, new = self.committed[rows], self.desired[rows]
        assert (new < old).all(), (rows, old, new)
        kept = np.where(new > self.floor, self.table_frames(rows, new), 0)
        retired = run_frames(self.slot_run[rows] + kept, self._slot_frames(rows) - kept)
        self.slot_run[rows[new == self.floor]] = NO_FRAME
        self._commit(rows)
        return retired

    def commit_raise(self, rows: np.ndarray) -> np.ndarray:
        """q becomes d, whose pages and table have landed. Returns the table frames no longer used."""
        old, new = self.committed[rows], self.desired[rows]
        assert (new > old).all(), (rows, old, new)
        assert (self._resident_width(rows) >= new).all(), (rows, new)
        retired = run_frames(self.slot_run[rows], self._slot_frames(rows))
        incoming = self._incoming_run[rows]
        at_floor = new == self.floor
        assert (at_floor == (old == 0)).all(), (rows, old, new)
        self.floor_run[rows[at_floor]] = incoming[at_floor]
        self.slot_run[rows[~at_floor]] = incoming[~at_floor]
        self._incoming_run[rows] = NO_FRAME
        self._commit(rows)
        return retired

    def begin_move_out(self, rows: np.ndarray) -> None:
        """Resident pages above q start leaving; they keep their frames until end_move."""
        leaving = (self.state[rows] == _GPU) & (self._planes >= self.committed[rows, None])
        self.state[rows] = np.where(leaving, _TO_CPU, self.state[rows])

    def begin_move_in(self, rows: np.ndarray, frames: np.ndarray, runs: np.ndarray) -> None:
        """Pages q..d-1 of the rows start arriving in these frames, which come row by row and page by page, and the
        tables of d in these runs.
        """
        state = self.state[rows]
        arriving = (self._planes >= self.committed[rows, None]) & (self._planes < self.desired[rows, None])
        assert (state[arriving] == _CPU).all(), rows
        self.state[rows] = np.where(arriving, _TO_GPU, state)
        at, planes = np.nonzero(arriving)
        pages = np.full((len(at), self.frames.shape[2]), NO_FRAME)
        pages[np.arange(pages.shape[1]) < self.sizes.plane_frames[rows[at], None]] = frames
        self.frames[rows[at], planes] = pages
        self._incoming_run[rows] = runs

    def end_move(self, rows: np.ndarray, *, landed: bool = True) -> np.ndarray:
        """Pages in transfer arrive, in whichever direction they go; returns the frames that nobody uses now.

        landed: False when pages on their way in will not come; their frames and the table's are returned.
        """
        state = self.state[rows]
        gone = state == _TO_CPU
        freed = [np.empty(0, dtype=np.int64)]
        if not landed:
            gone |= state == _TO_GPU
            incoming, wanted = self._incoming_run[rows], self.desired[rows]
            freed.append(run_frames(incoming, np.where(incoming >= 0, self.table_frames(rows, wanted), 0)))
            self._incoming_run[rows] = NO_FRAME
            self.desired[rows] = self.committed[rows]
        frames = self.frames[rows]
        freed.append(frames[gone].ravel())
        frames[gone] = NO_FRAME
        self.frames[rows] = frames
        state[state == _TO_GPU] = _GPU
        state[gone] = _CPU
        self.state[rows] = state
        freed_frames = np.concatenate(freed)
        return freed_frames[freed_frames >= 0]

    def table_runs(self) -> list[tuple[int, int]]:
        """(first frame, frames) of every table in use, ascending."""
        rows = np.arange(len(self.committed))
        firsts = np.concatenate([self.floor_run, self.slot_run])
        counts = np.concatenate([self.table_frames(rows, self.floor), self._slot_frames(rows)])
        order = np.argsort(firsts)
        order = order[firsts[order] >= 0]
        return list(zip(firsts[order].tolist(), counts[order].tolist(), strict=True))

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Frames of planes at rest, and whole runs of tables in use, are elsewhere now; the caller publishes."""
        rows = np.unique(self._arena.owner_rows[sources])
        rows = rows[rows >= 0]
        for held in (self.frames, self.floor_run, self.slot_run):
            held[rows] = replaced(held[rows], sources, targets)
        self._dirty[rows] |= self.committed[rows] > 0
        self._any_dirty = bool(self._dirty.any())

    def publish(self) -> None:
        """Write the changed rows into the device tables, ordered on the compute stream; nothing waits."""
        if not self._any_dirty:
            return
        rows = np.flatnonzero(self._dirty)
        frames = self.frames[rows].reshape(len(rows), -1)
        runs = np.where(self.slot_run[rows] >= 0, self.slot_run[rows], self.floor_run[rows])
        # A plane that is not there gets the null address: a kernel that read it would fault, not answer wrongly.
        address = np.where(frames >= 0, self._arena.address(frames), 0)
        packed = np.column_stack([rows, self.committed[rows], self._arena.address(runs), address])
        there = self._upload(packed)
        index, halves = there[:, 0], there.view(torch.int32)  # the lower half of a little number is the number
        self.tables.frame_address.index_copy_(0, index, there[:, 3:].unflatten(1, self.frames.shape[1:]))
        self.tables.table_address.index_copy_(0, index, there[:, 2])
        self.tables.bits.index_copy_(0, index, halves[:, 2])
        self._dirty[rows] = self._any_dirty = False

    def check(self) -> None:
        """Assert every invariant of table and arena together; for tests and after faults."""
        assert (self._resident_width(np.arange(len(self.committed))) >= self.committed).all()
        has_frames = self.frames[:, :, 0] >= 0
        assert (has_frames == (self.state != _CPU)).all()
        at_rest = ~self.busy()
        assert (self.desired == self.committed)[at_rest].all()
        assert ((self.slot_run >= 0) == (self.committed > self.floor)).all()
        assert ((self.floor_run >= 0) == (self.committed > 0)).all()
        rows, _, at = np.nonzero(self.frames >= 0)
        assert (at < self.sizes.plane_frames[rows]).all()
        assert len(rows) == int((has_frames * self.sizes.plane_frames[:, None]).sum())
        assert self._arena.are_owned_by(self.frames[self.frames >= 0], Owner(OwnerKind.PLANE, rows))
        every = self.frames[self.frames >= 0]
        assert len(np.unique(every)) == len(every)
        self._check_published()

    def _check_published(self) -> None:
        assert self._any_dirty == self._dirty.any()
        assert self._last_changed_at == self._changed_at.max()
        clean = np.flatnonzero(~self._dirty & (self.committed > 0))
        assert (self.tables.bits.cpu().numpy()[clean] == self.committed[clean]).all()
        published = self.tables.frame_address.cpu().numpy()[clean]
        frames = self.frames[clean]
        used = (self._planes < self.committed[clean, None])[:, :, None] & (frames >= 0)
        assert (published == self._arena.address(frames))[used].all()

    def _commit(self, rows: np.ndarray) -> None:
        self.committed[rows] = self.desired[rows]
        self.version += 1
        self._changed_at[rows] = self._last_changed_at = self.step
        self._dirty[rows] = self._any_dirty = True

    def _slot_frames(self, rows: np.ndarray) -> np.ndarray:
        committed = self.committed[rows]
        return np.where(committed > self.floor, self.table_frames(rows, committed), 0)

    def _resident_width(self, rows: np.ndarray) -> np.ndarray:
        """Leading planes on the device."""
        return np.logical_and.accumulate(self.state[rows] == _GPU, axis=1).sum(1)


def _identities(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 (R,) each: layer index, expert, projection."""
    index_of = {moe.layer: index for index, moe in enumerate(layout.moe_layers)}
    named = np.array([(index_of[b.layer], b.expert, b.projection) for b in layout.blocks()], dtype=np.int64)
    layer, expert, projection = named.T.copy()
    return layer, expert, projection


def _empty_tables(rows: int, planes: int, frames: int, memory: torch.Tensor) -> BlockTables:
    """Device tables that say width 0 everywhere; ordinary tensors even when made inside inference mode."""
    with torch.inference_mode(False):
        return BlockTables(
            torch.zeros(rows, dtype=torch.int32, device=memory.device),
            torch.zeros(rows, planes, frames, dtype=torch.int64, device=memory.device),
            torch.zeros(rows, dtype=torch.int64, device=memory.device),
            memory,
        )
