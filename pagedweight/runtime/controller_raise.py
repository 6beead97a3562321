"""What may be raised at a boundary: as many bytes as are free, as many rows as there is time for, none that found no
room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_pace import Pace
from pagedweight.runtime.frames import Arena
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import TableSnapshot, Transition

_STEPS_PER_RAISE = 2  # mean widths that a row rises by at once


class RaiseLimits:
    """Asked at every boundary, `begin` first."""

    def __init__(self, table: PageTable, pager: Pager, arena: Arena, config: RuntimeConfig) -> None:
        self._table = table
        self._pager = pager
        self._arena = arena
        self._config = config
        self._pace = Pace(timed=not config.deterministic)
        step_bytes = np.diff(table.snapshot().bytes, axis=1)  # empty where a model has one width
        self._mean_step_bytes = step_bytes.sum() / max(1, step_bytes.size)
        self._largest_step_bytes = int(step_bytes.max(initial=0))
        self._parent_at: tuple[tuple[int, int] | None, bool] = None, False
        self._asked: tuple[Transition, ...] = ()
        self._no_room: set[int] = set()

    def begin(self) -> None:
        """A boundary. Rows of the last one's raise for which the pager found no run of frames let others try, until
        none is left or frames are released. At later boundaries a row may have risen and been lowered again."""
        self._pace.tick()
        if not self._asked:
            return
        at_rest = self._table.desired == self._table.committed
        self._no_room |= {t.row for t in self._asked if at_rest[t.row] and self._table.committed[t.row] == t.from_bits}
        self._asked = ()

    def forget_refused(self) -> None:
        """Rows that found no room may try again."""
        self._no_room.clear()

    def candidates(self) -> TableSnapshot:
        """The table with rows that found no room taken for busy."""
        seen = self._table.snapshot()
        seen.busy[list(self._no_room)] = True
        return seen

    @property
    def at_parent_width(self) -> bool:
        """Whether no row can be raised further; asked at every boundary, so looked up once for each change."""
        now = self._table.version, self._pager.loading_bytes
        if self._parent_at[0] != now:
            self._parent_at = now, self._table.at_parent_width
        return self._parent_at[1]

    def available_bytes(self, kv: KVState, forecast_blocks: int) -> int:
        """What a plan may take, with more free blocks left than the reload threshold."""
        paced = max(int(self._pace.rows * _STEPS_PER_RAISE * self._mean_step_bytes), self._largest_step_bytes)
        return min(self._bytes_above(kv, self._config.reload_free_blocks + forecast_blocks), paced)

    def within(
        self, raising: Sequence[Transition], kv: KVState, forecast_blocks: int, available_bytes: int
    ) -> tuple[Transition, ...]:
        """The raises that fit what is available now, also while old tables stay beside the new ones until these serve.

        For that short time they may take blocks below the reload threshold, as long as that is no pressure.
        """
        room = self._bytes_above(kv, self._config.offload_free_blocks + forecast_blocks)
        old_tables = self._table.slot_bytes(np.array([t.row for t in raising], dtype=np.int64)).tolist()
        kept, most_rows = [], self._pace.rows
        for transition, old_table in zip(raising, old_tables, strict=True):
            if len(kept) == most_rows:
                break
            needed = transition.bytes + old_table
            if needed <= room and transition.bytes <= available_bytes:
                kept.append(transition)
                room -= needed
                available_bytes -= transition.bytes
        self._asked = tuple(kept)
        return self._asked

    def _bytes_above(self, kv: KVState, threshold_blocks: int) -> int:
        """Bytes that raises may take while more free blocks than the threshold stay."""
        loadable = self._config.max_loading_bytes - self._pager.loading_bytes
        return min(kv.bytes_above(threshold_blocks), self._arena.free_bytes, loadable)
