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
from pagedweight.runtime.planner_buckets import PRIOR_TOKENS
from pagedweight.runtime.planner_scores import parent_damage
from pagedweight.runtime.table_view import TableSnapshot

# 3.25 is the setting that MxMoE reports; at 6 every policy leaves everything where it is.
BUDGET_BITS = (2.5, 3.0, 3.25, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0)
FULL = "full planner"
UNIFORM = "uniform"
BF16 = "bf16"
BF16_BITS = 16
# (table, observation, policy, budget_bytes) -> (R,) widths
Choose = Callable[[TableSnapshot, Observation, Policy, int], np.ndarray]


class Contender(NamedTuple):
    """live: plans for each window from its own routing and features. budgets: its own, in mean bits.

    holds_both: it needs the lower and the higher width of every row on the device, whichever it takes.
    by_energies: column energies, measured window by window, take the prompt residual's place.
    """

    name: str
    choose: Choose
    live: bool
    budgets: tuple[float, ...] = ()
    holds_both: bool = False
    by_energies: bool = False


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


def plain_greedy(table: TableSnapshot, seen: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """The paper's greedy: single-width steps by damage per byte, each after the one above it, until the bytes fit.

    A step that is cheaper than the one above it comes right after that one, so it is sorted under the dearer's price.
    """
    damage, held = parent_damage(table, seen, policy), table.bytes.T
    rise, released = damage[-2::-1] - damage[:0:-1], held[:0:-1] - held[-2::-1]
    price = np.maximum.accumulate(rise / released, axis=0)
    depth, row = np.indices(price.shape).reshape(2, -1)
    order = np.lexsort((depth, row, price.reshape(-1)))
    freed = np.cumsum(released.reshape(-1)[order])
    count = int(np.searchsorted(freed, held[-1].sum() - budget_bytes)) + 1 if held[-1].sum() > budget_bytes else 0
    steps = np.bincount(row[order[:count]], minlength=len(table.bytes))
    return np.array(table.widths)[len(table.widths) - 1 - steps]


def with_prior(tokens: int) -> Choose:
    """The full planner with calibration's mass weighing as much as so many routed tokens."""

    def choose(table: TableSnapshot, seen: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
        if seen.routed is not None:
            seen = seen._replace(routed=seen.routed * (PRIOR_TOKENS / tokens))
        return initial_bits(table, policy, budget_bytes, seen)

    return choose


def without_buckets(policy: Policy) -> Policy:
    """Live mass and residual stay; the loosest floors and caps of any bucket hold for all."""
    return without_routing(policy).replaced(mass_trust=policy.mass_trust)


def _trusting(trust: float) -> Callable[[Policy], Policy]:
    return lambda policy: policy.replaced(mass_trust=trust)


def _residual_at(alpha: float) -> Callable[[Policy], Policy]:
    return lambda policy: policy.replaced(alpha=alpha)


def _bf16(table: TableSnapshot, seen: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    return np.full(len(table.committed), BF16_BITS)


def _baseline(name: str) -> Baseline:
    return next(baseline for baseline in BASELINES if baseline.name == name)


CONTENDERS = (
    # Uniform widths are measured as they are; the report interpolates between neighbours.
    Contender(UNIFORM, _baseline("uniform").initial_bits, False, tuple(map(float, WIDTHS))),
    Contender("static mixed", _baseline("static mixed").initial_bits, False),
    Contender("static mixed by layer", _baseline("static mixed by layer").initial_bits, False),
    Contender("layer swap", _baseline("layer swap").initial_bits, False),
    Contender("hotness tiers", _baseline("hotness tiers").initial_bits, True),
    Contender("dynamic pair", _baseline("dynamic pair").initial_bits, True, holds_both=True),
    Contender("w/o page movement", unseeing, False),
    Contender("w/o routing statistics", planner_with(without_routing), True),
    Contender("w/o prompt residual", planner_with(without_residual), True),
    Contender("w/o global sensitivity", planner_with(without_sensitivity), True),
    Contender("buckets alone", planner_with(buckets_alone), True),
    Contender("plain greedy", plain_greedy, True),
    Contender("column energies", planner_with(lambda policy: policy), True, by_energies=True),
    Contender(BF16, _bf16, False, (float(BF16_BITS),)),
    Contender(FULL, planner_with(lambda policy: policy), True),
)
# Settings of the full planner, to be chosen on windows that no reported figure is of (--skip).
SETTINGS = (
    *(Contender(f"mass trust {trust}", planner_with(_trusting(trust)), True) for trust in (0.0, 0.5, 1.0)),
    *(Contender(f"prior of {tokens} tokens", with_prior(tokens), True) for tokens in (64, 128, 512, 1024)),
    *(Contender(f"residual at {alpha}", planner_with(_residual_at(alpha)), True) for alpha in (0.0, 0.5, 1.0)),
    Contender("no buckets", planner_with(without_buckets), True),
    Contender(FULL, planner_with(lambda policy: policy), True),
)
CONTESTS = {"policies": CONTENDERS, "settings": SETTINGS}


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


def held_bytes(table: TableSnapshot, bits: np.ndarray) -> int:
    """Bytes of all rows at their widths (R,)."""
    return int(table.bytes[np.arange(len(bits)), np.searchsorted(table.widths, bits)].sum())


def mean_bits(layout: Layout, bits: np.ndarray) -> float:
    return code_bytes(layout, bits) / code_bytes(layout, np.ones_like(bits))
