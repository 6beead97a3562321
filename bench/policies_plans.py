"""Who competes in bench/policies.py: a name, what it looks at, and the widths that it chooses within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bench.quality_parts import WIDTHS, code_bytes
from pagedweight.bitplane import plane_words
from pagedweight.calibration.search import table_at_parent
from pagedweight.layout import Layout
from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import initial_bits
from pagedweight.runtime.planner_baselines import (
    BASELINES,
    Baseline,
    without_residual,
    without_routing,
    without_sensitivity,
)
from pagedweight.runtime.table_view import TableSnapshot

BUDGET_BITS = (2.5, 3.0, 3.5, 4.0, 5.0)
FULL = "full planner"
UNIFORM = "uniform"
# (table, observation, policy, budget_bytes) -> (R,) widths
Choose = Callable[[TableSnapshot, Observation, Policy, int], np.ndarray]


class Contender(NamedTuple):
    """live: plans for each window from its own routing and features. budgets: its own, in mean bits."""

    name: str
    choose: Choose
    live: bool
    budgets: tuple[float, ...] = ()


def planner_with(change: Callable[[Policy], Policy]) -> Choose:
    """The planner's greedy from the parent width, under a changed policy."""

    def choose(table: TableSnapshot, seen: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
        return initial_bits(table, change(policy), budget_bytes, seen)

    return choose


def unseeing(table: TableSnapshot, seen: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """The widths before serving, which nothing moves afterwards."""
    return initial_bits(table, policy, budget_bytes, Observation(KVState(1, 1)))


def buckets_alone(policy: Policy) -> Policy:
    """Live routing as buckets of two multipliers, 1.6 apart, as a search found best without live mass."""
    buckets = {"bucket_edges": [0.5], "multipliers": np.array([1.6**-0.5, 1.6**0.5])}
    limits = {"floors": np.array([[policy.widths[0]] * 2]), "depth_caps": np.array([[len(policy.widths)] * 2])}
    return policy.replaced(mass_trust=0.0, **buckets, **limits)


def _baseline(name: str) -> Baseline:
    return next(baseline for baseline in BASELINES if baseline.name == name)


CONTENDERS = (
    # Uniform widths are measured as they are; the report interpolates between neighbours.
    Contender(UNIFORM, _baseline("uniform").initial_bits, False, tuple(map(float, WIDTHS))),
    Contender("static mixed", _baseline("static mixed").initial_bits, False),
    Contender("static mixed by layer", _baseline("static mixed by layer").initial_bits, False),
    Contender("layer swap", _baseline("layer swap").initial_bits, False),
    Contender("hotness tiers", _baseline("hotness tiers").initial_bits, True),
    Contender("dynamic pair", _baseline("dynamic pair").initial_bits, True),
    Contender("w/o page movement", unseeing, False),
    Contender("w/o routing statistics", planner_with(without_routing), True),
    Contender("w/o prompt residual", planner_with(without_residual), True),
    Contender("w/o global sensitivity", planner_with(without_sensitivity), True),
    Contender("buckets alone", planner_with(buckets_alone), True),
    Contender(FULL, planner_with(lambda policy: policy), True),
)


def plan_table(layout: Layout, bytes_: str) -> TableSnapshot:
    """Every row at the parent width; M_i^b in bytes of planes alone ("code") or as the runtime holds them ("true").

    With some hundred columns a 16-bit table outweighs the planes, which no real model shows; planes alone do not.
    """
    table = table_at_parent(layout)
    if bytes_ == "true":
        return table
    plane = np.array([4 * n * plane_words(k) for n, k in layout.row_shapes()])
    return table._replace(bytes=plane[:, None] * np.array(layout.widths))


def budget_bytes(table: TableSnapshot, bits: float) -> int:
    """What all rows hold at a mean width, between uniform widths along a line."""
    return int(np.interp(bits, table.widths, table.bytes.sum(axis=0)))


def mean_bits(layout: Layout, bits: np.ndarray) -> float:
    return code_bytes(layout, bits) / code_bytes(layout, np.ones_like(bits))
