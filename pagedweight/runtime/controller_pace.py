"""How many rows may rise at one boundary: what the steps between boundaries have time for."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

# Launching a raise takes the host about 50 us (bench_pager on an H200), more where frames have to move for its table.
_RAISE_SECONDS = 50e-6
_SHARE = 0.05  # of a step, for launching raises
_FEWEST_ROWS, _MOST_ROWS = 8, 256
_STEPS_SEEN = 9


class Pace:
    """Measured from one boundary to the next, the median of a few: neither a prompt nor an idle hour says how long
    the next step will be.

    rows_unmeasured: before there has been a step, and always when not `timed`.
    """

    rows_unmeasured = 32

    def __init__(self, *, timed: bool = True) -> None:
        self._timed = timed
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=_STEPS_SEEN)

    def tick(self) -> None:
        """A boundary."""
        if not self._timed:
            return
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    @property
    def rows(self) -> int:
        if not self._seconds:
            return self.rows_unmeasured
        affordable = _SHARE * float(np.median(self._seconds)) / _RAISE_SECONDS
        return int(np.clip(affordable, _FEWEST_ROWS, _MOST_ROWS))
