"""Bringing every row to a given width and waiting until it is there."""

from __future__ import annotations

import numpy as np

from pagedweight.runtime.frames import Arena, OutOfFrames
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import TableSnapshot, Transition


class Widths:
    """most_loading_bytes: how much may be on its way to the device at once."""

    def __init__(self, table: PageTable, pager: Pager, arena: Arena, most_loading_bytes: int) -> None:
        self._table = table
        self._pager = pager
        self._arena = arena
        self._most_loading_bytes = most_loading_bytes

    def bring_to(self, bits: np.ndarray | int) -> None:
        """One width, or one for each row. Raises TypeError for what are no ints, ValueError for an unsupported width or
        another number of them, OutOfFrames when the arena cannot hold them all, with those that fit in place.
        """
        wanted = self._for_each_row(np.asarray(bits))
        supported = self._table.sizes.widths
        unsupported = sorted(set(wanted.tolist()) - set(supported))
        if unsupported:
            raise ValueError(f"widths {unsupported} are not supported; use {supported}")
        self._pager.settle()
        self.carry_out(np.minimum(wanted, self._table.committed))
        before = None
        while (missing := wanted - self._table.committed).any():
            if before is not None and (missing == before).all():
                raise OutOfFrames(
                    f"{np.count_nonzero(missing)} rows do not fit at the widths wanted: {self._arena.free_bytes} bytes "
                    "are free; raise the budget or ask for fewer bits"
                )
            # More than once when frames have to move for tables: only so many do in one go.
            self.carry_out(wanted)
            before = missing

    def _for_each_row(self, bits: np.ndarray) -> np.ndarray:
        rows = self._table.committed.shape
        asked = f"give one width, or one for each of {rows[0]} rows"
        if bits.dtype.kind not in "iu":
            raise TypeError(f"widths are no ints but {bits.dtype}; {asked}")
        if bits.shape not in ((), (1,), rows):
            raise ValueError(f"widths have shape {bits.shape}; {asked}")
        return np.broadcast_to(bits.astype(np.int64), rows)

    def carry_out(self, bits: np.ndarray) -> None:
        """Move every row towards a width and wait."""
        moves = _transitions(self._table.snapshot(), bits)
        self._pager.lower(moves)
        self._table.publish()
        raising = [t for t in moves if not t.lowers]
        sent = np.cumsum([t.bytes for t in raising]) // self._most_loading_bytes
        for part in range(int(sent[-1]) + 1 if raising else 1):
            self._pager.start(t for t, at in zip(raising, sent, strict=True) if at == part)
            self._pager.settle()


def _transitions(seen: TableSnapshot, bits: np.ndarray) -> list[Transition]:
    """Transitions from the committed widths to others; a row that has none yet needs all its bytes."""
    held = np.concatenate([np.zeros_like(seen.bytes[:, :1]), seen.bytes], axis=1)
    widths = np.array([0, *seen.widths])
    rows = np.flatnonzero(bits != seen.committed)
    before, after = seen.committed[rows], bits[rows]
    change = held[rows, np.searchsorted(widths, after)] - held[rows, np.searchsorted(widths, before)]
    columns = (rows.tolist(), before.tolist(), after.tolist(), np.abs(change).tolist())
    return list(map(Transition._make, zip(*columns, strict=True)))
