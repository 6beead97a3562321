"""Plans as values: what the runtime carries out, and the queue that keeps one ready for every byte target."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_cover import Change
from pagedweight.runtime.planner_greedy import Steps
from pagedweight.runtime.planner_scores import Scores, lowest_index
from pagedweight.runtime.table_view import TableSnapshot, Transition

_LONGEST_LADDER = 40


class Plan(NamedTuple):
    """A page movement plan Pi: transitions by row, with their predicted damage and bytes.

    damage: predicted damage added by a lowering, taken back (negative) by a raise.
    released_bytes: bytes freed by a lowering, needed (negative) by a raise.
    shortfall_bytes: what a lowering lacks of its target; the largest reduction that is safe was not enough.
    """

    transitions: tuple[Transition, ...] = ()
    damage: float = 0.0
    released_bytes: int = 0
    shortfall_bytes: int = 0


EMPTY_PLAN = Plan()


class QueuedPlan(NamedTuple):
    """A plan in the queue, kept as a prefix of its stage's steps so that a ladder of targets shares one sort.

    stage, level: bitwidth-floor stage and depth-cap level that it was made under. target_bytes: what it was made for.
    start: (R,) width index of every row then. made_at: the queue's step number then.
    whole: its steps are in no order of price, so that it is good for all of them or none.
    """

    stage: int
    level: int
    target_bytes: int
    made_at: int
    start: np.ndarray
    steps: Steps
    change: Change
    whole: bool = False

    @property
    def released_bytes(self) -> int:
        return self.change.bytes

    @property
    def damage(self) -> float:
        return self.change.damage

    def reached(self) -> np.ndarray:
        """(R,) width index of every row after the plan."""
        index = self.steps.reached(self.start, self.change.count)
        index[list(self.change.rows)] = self.change.to
        return index


class Queue(NamedTuple):
    """Q_t: plans by ascending target, and how many planner steps have refreshed it. Empty before the first step."""

    plans: tuple[QueuedPlan, ...] = ()
    step: int = 0


def ladder(block_bytes: int, largest_bytes: int) -> list[int]:
    """Byte targets to keep plans ready for: one KV block, then doubling, and everything that can be released."""
    rungs = [block_bytes << k for k in range(_LONGEST_LADDER) if block_bytes << k < largest_bytes]
    return [*rungs, largest_bytes] if largest_bytes > 0 else []


def refresh_plan_queue(queue: Queue, fresh: list[QueuedPlan], scores: Scores) -> Queue:
    """Q_{t+1}: fresh plans replace older ones for the same target; older ones whose rows have moved since are gone."""
    targets = {plan.target_bytes for plan in fresh}
    kept = [p for p in queue.plans if p.target_bytes not in targets and _still_starts_here(p, scores)]
    plans = sorted([*kept, *fresh], key=lambda plan: (plan.target_bytes, plan.made_at))
    return Queue(tuple(plans), queue.step + 1)


def select_best_plan(
    plans: list[QueuedPlan],
    scores: Scores,
    table: TableSnapshot,
    observation: Observation,
    policy: Policy,
    target_bytes: int,
    strictest: tuple[int, int],
) -> QueuedPlan | None:
    """Of the still valid plans that meet the target the one of least damage as predicted now, ties to the newest.

    strictest: the first (stage, level) whose floors and caps can provide the target; plans of later ones do not count.
    """
    newest = max((plan.made_at for plan in plans), default=0)
    best, best_key = None, None
    for plan in plans:
        if plan.released_bytes < target_bytes or (plan.stage, plan.level) > strictest:
            continue
        fresh = plan.made_at == newest
        damage = plan.damage if fresh else reprice(plan, scores, table, observation, policy)
        key = (damage, -plan.made_at, plan.released_bytes)
        if damage is not None and (best_key is None or key < best_key):
            best, best_key = plan, key
    return best


def reprice(
    plan: QueuedPlan, scores: Scores, table: TableSnapshot, observation: Observation, policy: Policy
) -> float | None:
    """An older plan's damage as predicted now, or None when it is no longer valid."""
    if not _still_starts_here(plan, scores):
        return None
    reached = plan.reached()
    moved = np.flatnonzero(reached != plan.start)
    lowest = lowest_index(scores, table, observation, policy, plan.stage, plan.level)
    if (reached[moved] < lowest[moved]).any():
        return None
    return float(scores.damage[reached[moved], moved].sum())


def _still_starts_here(plan: QueuedPlan, scores: Scores) -> bool:
    if plan.start.shape != scores.committed.shape:
        return False
    moved = plan.reached() != plan.start
    return bool((scores.movable & (plan.start == scores.committed))[moved].all())


def transitions(
    table: TableSnapshot, start: np.ndarray, reached: np.ndarray, names: np.ndarray | None
) -> tuple[Transition, ...]:
    """Transitions of the rows that move, by row. names: (R,) each row's number for the caller, None for its index."""
    moved = np.flatnonzero(reached != start)
    widths = np.asarray(table.widths)
    before, after = start[moved], reached[moved]
    bytes_ = np.abs(table.bytes[moved, before] - table.bytes[moved, after])
    rows = moved if names is None else names[moved]
    columns = (rows.tolist(), widths[before].tolist(), widths[after].tolist(), bytes_.tolist())
    return tuple(sorted(map(Transition._make, zip(*columns, strict=True))))
