"""Ways to choose widths within a budget, all over the same nested pages, so that only the choice differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import initial_bits
from pagedweight.runtime.planner_baselines import BASELINES
from pagedweight.runtime.table_view import TableSnapshot

REFERENCE = "reference"
FULL = "pagedweight"


class Method(NamedTuple):
    """choose: (R,) widths. live: plans for each item from the signals of its beginning."""

    choose: Callable[[TableSnapshot, Observation, Policy, int], np.ndarray]
    live: bool


def _full(table: TableSnapshot, seen: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    return initial_bits(table, policy, budget_bytes, seen)


LIVE_BASELINES = {"hotness tiers", "dynamic pair"}
RENAMED = {"without page movement": "pagedweight static"}
METHODS = {
    RENAMED.get(one.name, one.name): Method(one.initial_bits, one.name in LIVE_BASELINES) for one in BASELINES
} | {FULL: Method(_full, True)}
DEFAULT_METHODS = ("uniform", "pagedweight static", FULL)


class Budget(NamedTuple):
    """What expert weights may take: a mean width in bits, or bytes."""

    name: str
    bits: float | None
    bytes: int | None

    def of(self, table: TableSnapshot) -> int:
        """Bytes as the runtime holds them; between uniform widths along a line."""
        if self.bytes is not None:
            return self.bytes
        return int(np.interp(self.bits, table.widths, table.bytes.sum(axis=0)))
