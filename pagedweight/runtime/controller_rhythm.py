"""Pressure that soon comes back, such as bursts of short prompts: what it would lower again is not raised yet."""

from __future__ import annotations

import math

from pagedweight.runtime.pager import Pager
from pagedweight.runtime.table import PageTable

# A slower rhythm than this is followed.
_LONGEST_HOLD_STEPS = 64


class Rhythm:
    """hold_steps: boundaries that there has to have been room for before rows are raised."""

    def __init__(self, table: PageTable, pager: Pager) -> None:
        self.hold_steps = 0
        self._table = table
        self._pager = pager
        self._version = table.version
        self._lowered_rows, self._lowered_at = pager.moves.lowered_rows, -math.inf
        self._raised_since = False

    def raised(self) -> None:
        """Rows are on their way up."""
        self._raised_since = True

    def learn(self) -> None:
        """At every boundary. Rows that were raised just to fall again, by a plan or an emergency, are not raised
        before there has been room for twice as long."""
        if self._version == self._table.version:
            return
        self._version, lowered = self._table.version, self._pager.moves.lowered_rows
        if lowered == self._lowered_rows:
            return
        since = self._table.step - self._lowered_at
        if since > 2 * _LONGEST_HOLD_STEPS:
            self.hold_steps //= 2
        elif self._raised_since:
            self.hold_steps = min(max(self.hold_steps, 2 * since), _LONGEST_HOLD_STEPS)
        self._lowered_rows, self._lowered_at, self._raised_since = lowered, self._table.step, False
