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

    step: boundaries so far.
    bytes_by_owner: planes, tables, KV and free; sums to the arena, moves in flight included.
    bytes_by_width: sum of M_i^q of the rows at each committed width.
    bits: int64 (R,), committed widths. mean_bits: over routed expert weights, not over rows.
    kv: the gauge's last reading, None without a gauge.
    loading_bytes, releasing_bytes: on their way in and out.
    shortfall_bytes: what the last plan under pressure could not release; 0 once pressure is over.
    moves: rows and bytes moved since the start, and what they took.
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

    @property
    def in_flight_bytes(self) -> int:
        """Bytes on their way in or out; whose they are, bytes_by_owner says."""
        return self.loading_bytes + self.releasing_bytes

    def __str__(self) -> str:
        """The accounts in four lines, in MiB."""
        held, moves = self.bytes_by_owner, self.moves
        free_blocks = 0 if self.kv is None else self.kv.free_blocks
        by_width = ", ".join(f"{bits} bits {_mib(size)}" for bits, size in self.bytes_by_width.items() if size)
        return (
            f"arena {_mib(sum(held.values()))} MiB: planes {_mib(held['plane'])}, tables {_mib(held['table'])}, "
            f"KV {_mib(held['kv'])}, free {_mib(held['free'])}; in flight {_mib(self.in_flight_bytes)}\n"
            f"weights at {self.mean_bits:.2f} bits: {by_width} MiB; "
            f"{free_blocks} KV blocks free, short of {_mib(self.shortfall_bytes)} MiB\n"
            f"moved: {moves.lowered_rows} rows lowered, {_mib(moves.released_bytes)} MiB released, "
            f"{moves.raised_rows} raised, {_mib(moves.loaded_bytes)} MiB loaded at "
            f"{moves.loaded_bytes_per_second / 1e9:.1f} GB/s\n"
            f"{_mib(moves.written_back_bytes)} MiB written back, {_mib(moves.relocated_bytes)} MiB moved within the "
            f"arena, {moves.deferred_rows} raises put off, {moves.cancelled_rows} given up, waited "
            f"{1e3 * moves.stalled_seconds:.1f} ms for the device"
        )


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


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


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
    """The linear-block of these names; KeyError when the projection is none, or an expert is not named."""
    if expert is None:
        raise KeyError(f"an expert of layer {layer} has to be named, and gate_up or down of it")
    for known in Projection:
        if projection in (known, known.label):
            return BlockId(layer, expert, known)
    raise KeyError(f"projection {projection!r}: a linear-block is gate_up or down")
