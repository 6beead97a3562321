"""What the runtime says about itself: byte accounts, widths and moves, as values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.layout import BlockId, Projection
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.pager import Moves, Pager
from pagedweight.runtime.table import PageState, PageTable


class RuntimeSnapshot(NamedTuple):
    """The runtime at one moment; every figure is bytes that it holds or rows that it has moved.

    bytes_by_owner: planes, tables, KV and free; sums to the arena, moves in flight included.
    bytes_by_width: sum of M_i^q of the rows at each committed width.
    bits: int64 (R,), committed widths. mean_bits: over routed expert weights, not over rows.
    kv: the gauge's last reading, None without a gauge.
    shortfall_bytes: what the last plan under pressure could not release; 0 once pressure is over.
    """

    step: int
    bytes_by_owner: dict[str, int]
    bytes_by_width: dict[int, int]
    bits: np.ndarray
    mean_bits: float
    kv: KVState | None
    loading_bytes: int
    releasing_bytes: int
    shortfall_bytes: int
    moves: Moves

    @property
    def weight_bytes(self) -> int:
        """Bytes of planes and tables, those on their way in or out included."""
        return self.bytes_by_owner["plane"] + self.bytes_by_owner["table"]

    @property
    def kv_bytes(self) -> int:
        return self.bytes_by_owner["kv"]


def take_snapshot(
    table: PageTable,
    pager: Pager,
    bytes_by_owner: dict[str, int],
    weights: np.ndarray,
    kv: KVState | None,
    shortfall_bytes: int,
) -> RuntimeSnapshot:
    """weights: (R,) number of weights of each row."""
    seen = table.snapshot()
    held = np.take_along_axis(seen.bytes, table.width_index(seen.committed)[:, None], axis=1)[:, 0]
    return RuntimeSnapshot(
        step=table.step,
        bytes_by_owner=bytes_by_owner,
        bytes_by_width={b: int(held[seen.committed == b].sum()) for b in seen.widths},
        bits=seen.committed,
        mean_bits=float((seen.committed * weights).sum() / weights.sum()),
        kv=kv,
        loading_bytes=pager.loading_bytes,
        releasing_bytes=pager.releasing_bytes,
        shortfall_bytes=shortfall_bytes,
        moves=pager.moves,
    )


def explain_row(table: PageTable, row: int, block: BlockId) -> str:
    """One row of the page table in a sentence."""
    seen = table.snapshot()
    states = " ".join(PageState(state).name for state in table.state[row])
    held = seen.bytes[row, table.width_index(seen.committed[row])]
    return (
        f"{block}: {seen.committed[row]} bits committed, {seen.desired[row]} desired, {held} bytes, "
        f"changed {seen.since[row]} boundaries ago, planes {states}"
    )


def block_named(layer: int, expert: int | None, projection: Projection | str | None) -> BlockId:
    """The linear-block of these names; KeyError when the projection is none."""
    for known in Projection:
        if projection in (known, known.label):
            return BlockId(layer, expert, known)
    raise KeyError(f"projection {projection!r}: a linear-block is gate_up or down")
