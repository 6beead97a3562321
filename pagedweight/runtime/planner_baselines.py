"""Other policies behind the planner's interface, to compare with: what they choose follows published systems' rules.

Every one chooses widths within a byte budget; `Baseline` turns that into initial widths and plans. Ablations (Table 4)
are the full planner with a policy that lacks a part, and, without page movement, its initial widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Plan, Queue, held_bytes, initial_plan, release_target_bytes
from pagedweight.runtime.planner_allocate import least_damage_index, row_mass
from pagedweight.runtime.planner_queue import EMPTY_PLAN, transitions
from pagedweight.runtime.planner_scores import bytes_above, canonical, committed_index, parent_damage
from pagedweight.runtime.table_view import TableSnapshot

# (table, observation, policy, budget_bytes) -> (R,) width index of every row; may stay above the budget if it must.
Choose = Callable[[TableSnapshot, Observation, Policy, int], np.ndarray]


class Baseline(NamedTuple):
    """A way to choose widths. follows_pressure is False for static ones: their plans are always empty."""

    name: str
    choose: Choose
    follows_pressure: bool = True

    def initial_bits(
        self, table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int
    ) -> np.ndarray:
        """(R,) widths before serving; ValueError when they do not fit the budget."""
        table, observation, policy, names = canonical(table, observation, policy)
        index = self.choose(table, observation, policy, budget_bytes)
        held = _bytes_at(table, index)
        if held > budget_bytes:
            raise ValueError(f"{self.name} needs {held} bytes at the least; the budget is {budget_bytes}")
        bits = np.asarray(table.widths)[index]
        return bits if names is None else bits[np.argsort(names)]

    def plan_step(
        self, table: TableSnapshot, observation: Observation, policy: Policy, queue: Queue
    ) -> tuple[Queue, Plan]:
        """As planner.plan_step; rows are only ever lowered, and rows in transfer stay."""
        table, observation, policy, names = canonical(table, observation, policy)
        target = release_target_bytes(table, observation)
        if not target or not self.follows_pressure:
            return queue, EMPTY_PLAN._replace(shortfall_bytes=target)
        committed = committed_index(table)
        index = np.minimum(self.choose(table, observation, policy, held_bytes(table) - target), committed)
        index = np.where(table.busy, committed, index)
        released = held_bytes(table) - _bytes_at(table, index)
        against_parent, rows = parent_damage(table, observation, policy), np.arange(len(index))
        damage = float((against_parent[index, rows] - against_parent[committed, rows]).sum())
        return queue, Plan(transitions(table, committed, index, names), damage, released, max(0, target - released))


def uniform(table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """One width for every block, the largest that fits."""
    fitting = np.flatnonzero(table.bytes.sum(axis=0) <= budget_bytes)
    return np.full(len(table.committed), fitting[-1] if fitting.size else 0)


def static_mixed(table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """MxMoE's objective over the whole model: least sum of error norms (roots of sensitivity), offline only."""
    return _least_within(table, _error_norm(policy), budget_bytes)


def static_mixed_by_layer(
    table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int
) -> np.ndarray:
    """The same with a budget for each layer in proportion to its bytes, as MxMoE does it: no bits cross layers."""
    norm, total = _error_norm(policy), int(table.bytes[:, -1].sum())
    index = np.empty(len(table.committed), dtype=np.int64)
    for layer in np.unique(table.layer):
        rows = np.flatnonzero(table.layer == layer)
        share = int(budget_bytes * (int(table.bytes[rows, -1].sum()) / total))
        own = TableSnapshot(table.widths, *(column[rows] for column in table[1:]))
        index[rows] = _least_within(own, norm[:, rows], share)
    return index


def unmoving(table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """Ablation: the planner's own initial widths, from offline sensitivity alone, for good."""
    start, plan = initial_plan(table, policy, budget_bytes, Observation(KVState(0, 1)))
    index = committed_index(start).astype(np.int64)
    index[[move.row for move in plan.transitions]] = np.searchsorted(
        table.widths, [move.to_bits for move in plan.transitions]
    )
    return index


def hotness_tiers(table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """DynaExq's rule: in every layer the hottest experts at the high width, the rest at the low, sensitivity unseen."""
    mass = row_mass(table, observation, policy)
    hottest_first = np.lexsort((table.projection, table.expert, table.layer, -mass))
    return _promoted(table, hottest_first, table.layer * (table.expert.max() + 1) + table.expert, budget_bytes)


def layer_swap(table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """MorphServe's rule: whole layers at the low width, those first whose swap costs the least damage per byte."""
    damage = policy.sensitivity[:, 0] - policy.sensitivity[:, -1]
    released = table.bytes[:, -1] - table.bytes[:, 0]
    price = np.bincount(table.layer, damage) / np.maximum(np.bincount(table.layer, released), 1)
    dearest_first = np.lexsort((table.layer, -price[table.layer]))
    return _promoted(table, dearest_first, table.layer, budget_bytes)


def dynamic_pair(table: TableSnapshot, observation: Observation, policy: Policy, budget_bytes: int) -> np.ndarray:
    """DP-LLM's rule, for quality only: two neighbouring widths, the higher where this input's error is worst.

    It would need both widths of a block on the device at once; the budget counts the chosen one alone.
    """
    low = uniform(table, observation, policy, budget_bytes)
    high = np.minimum(low + 1, len(table.widths) - 1)
    rows = np.arange(len(low))
    against_parent = parent_damage(table, observation, policy)
    gain, extra = (
        against_parent[low, rows] - against_parent[high, rows],
        table.bytes[rows, high] - table.bytes[rows, low],
    )
    worst_first = np.lexsort((rows, -gain / np.maximum(extra, 1)))
    fits = np.cumsum(extra[worst_first]) <= budget_bytes - _bytes_at(table, low)
    index = low.copy()
    index[worst_first[fits]] = high[worst_first[fits]]
    return index


def without_routing(policy: Policy) -> Policy:
    """Ablation: no buckets and no live mass; the loosest floors and caps of any bucket hold for all."""
    return policy.replaced(
        mass_trust=0.0,
        bucket_edges=np.empty(0),
        multipliers=np.ones(1),
        floors=policy.floors.min(axis=1, keepdims=True),
        depth_caps=policy.depth_caps.max(axis=1, keepdims=True),
    )


def without_residual(policy: Policy) -> Policy:
    """Ablation: every prompt is the average prompt."""
    return policy.replaced(alpha=0.0)


def without_sensitivity(policy: Policy) -> Policy:
    """Ablation: all blocks are alike, by projection and width the mean of all; routing and residual stay."""
    s_bar = policy.s_bar.copy()
    for projection in (0, 1):
        rows = policy.blocks[:, 2] == projection
        s_bar[rows] = s_bar[rows].mean(axis=0)
    return policy.replaced(s_bar=s_bar, m_cal=np.full(policy.rows, policy.m_cal.mean()))


BASELINES = (
    Baseline("uniform", uniform),
    Baseline("static mixed", static_mixed, follows_pressure=False),
    Baseline("static mixed by layer", static_mixed_by_layer, follows_pressure=False),
    Baseline("without page movement", unmoving, follows_pressure=False),
    Baseline("hotness tiers", hotness_tiers),
    Baseline("layer swap", layer_swap),
    Baseline("dynamic pair", dynamic_pair),
)


def _error_norm(policy: Policy) -> np.ndarray:
    """(W, R), growth of each block's error norm from the parent width."""
    norm = np.sqrt(policy.sensitivity.T)
    return np.maximum(norm - norm[-1], 0.0)


def _least_within(table: TableSnapshot, damage: np.ndarray, budget_bytes: int) -> np.ndarray:
    """(R,) width index of least total damage (W, R) within the budget, from the parent width."""
    parent = np.full(len(table.committed), len(table.widths) - 1)
    released = -bytes_above(table, parent)
    return least_damage_index(released, damage, parent, int(table.bytes[:, -1].sum()) - budget_bytes)


def _promoted(table: TableSnapshot, order: np.ndarray, group: np.ndarray, budget_bytes: int) -> np.ndarray:
    """Everything at the floor, then whole groups of rows at the parent width, in order, while they fit."""
    index = np.zeros(len(order), dtype=np.int64)
    left = budget_bytes - _bytes_at(table, index)
    groups = group[order]
    _, first = np.unique(groups, return_index=True)
    for at in groups[np.sort(first)].tolist():
        rows = np.flatnonzero(group == at)
        extra = int((table.bytes[rows, -1] - table.bytes[rows, 0]).sum())
        if extra > left:
            break
        index[rows] = len(table.widths) - 1
        left -= extra
    return index


def _bytes_at(table: TableSnapshot, index: np.ndarray) -> int:
    return int(table.bytes[np.arange(len(index)), index].sum())
