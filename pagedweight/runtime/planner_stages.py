"""Bitwidth-floor stages and depth caps: which constraints a byte target needs loosened, and its plan under them."""

from __future__ import annotations

import math

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_cover import Change, cover
from pagedweight.runtime.planner_greedy import Steps, hull_steps
from pagedweight.runtime.planner_queue import QueuedPlan
from pagedweight.runtime.planner_scores import Scores, committed_index, lowest_index, parent_damage
from pagedweight.runtime.table_view import TableSnapshot


def plans_for_targets(
    table: TableSnapshot,
    observation: Observation,
    policy: Policy,
    scores: Scores,
    targets: list[int],
    urgent: int,
    made_at: int,
) -> tuple[list[QueuedPlan], QueuedPlan | None]:
    """A plan for every target that can be met, each under the strictest stage and caps that provide it.

    Also the plan for `urgent` (one of the targets, or 0 for none): refined, and the largest reduction where no stage
    meets it.
    """
    waiting, plans, largest, chosen = sorted(set(targets)), [], None, None
    limited = math.isfinite(observation.limits.damage)
    constraints = list(np.ndindex(len(policy.floors), len(policy.depth_caps)))
    for stage, level in constraints:
        if not waiting:
            break
        lowest = lowest_index(scores, table, observation, policy, stage, level)
        capacity = largest_release(scores, lowest)
        if capacity < waiting[0] and (stage, level) != constraints[-1] and not limited:
            continue
        # Nothing to choose where all of it is wanted: no need to sort.
        everything = not limited and capacity <= waiting[0]
        steps = lower_everything(scores, lowest) if everything else legal_steps(scores, lowest)
        allowed = affordable_steps(steps, table, observation, policy) if limited else len(steps.row)
        most_bytes, _ = steps.totals(allowed)
        for target in [target for target in waiting if target <= most_bytes]:
            count = steps.meeting(target)
            change = Change(count, (), (), *steps.totals(count))
            if target == urgent and not limited and not everything:
                change = covering(scores, lowest, steps, target)
            plans.append(QueuedPlan(stage, level, target, made_at, scores.committed, steps, change))
            chosen = plans[-1] if target == urgent else chosen
        waiting = [target for target in waiting if target > most_bytes]
        if urgent in waiting and (largest is None or most_bytes > largest.released_bytes):
            change = Change(allowed, (), (), *steps.totals(allowed))
            largest = QueuedPlan(stage, level, urgent, made_at, scores.committed, steps, change)
    return plans, chosen or largest


def lower_everything(scores: Scores, lowest: np.ndarray) -> Steps:
    """One step for each row that can be lowered, to the width index lowest (R,), by row."""
    row = np.flatnonzero(lowest < scores.committed)
    to = lowest[row]
    released, damage = np.cumsum(scores.released[to, row]), np.cumsum(scores.damage[to, row])
    return Steps(row, scores.committed[row], to, released, damage)


def largest_release(scores: Scores, lowest: np.ndarray) -> int:
    """Bytes that lowering every row to the width index lowest (R,) releases."""
    return int(scores.released[lowest, np.arange(len(lowest))].sum())


def legal_steps(scores: Scores, lowest: np.ndarray) -> Steps:
    """Steps within the moves that lowest (R,) permits."""
    width_index = np.arange(len(scores.released), dtype=np.int8)[:, None]
    legal = (width_index >= lowest.astype(np.int8)) & (width_index < scores.committed)
    return hull_steps(scores.released * legal, scores.damage, scores.committed)


def covering(scores: Scores, lowest: np.ndarray, steps: Steps, target_bytes: int) -> Change:
    """The cheapest plan within the moves that lowest (R,) permits; the steps must release target_bytes."""
    width_index = np.arange(len(scores.released))[:, None]
    legal = (width_index >= lowest) & (width_index < scores.committed)
    damage = np.where(legal | (width_index == scores.committed), scores.damage, np.inf)
    return cover(steps, scores.committed, scores.released, damage, target_bytes, steps.meeting(target_bytes))


def affordable_steps(steps: Steps, table: TableSnapshot, observation: Observation, policy: Policy) -> int:
    """Steps, cheapest first, after which damage against the parent width is still within the limit."""
    against_parent = parent_damage(table, observation, policy)
    rows = np.arange(len(table.committed))
    now = against_parent[committed_index(table), rows].sum()
    added = against_parent[steps.to, steps.row] - against_parent[steps.origin, steps.row]
    beyond = np.flatnonzero(now + np.cumsum(added) > observation.limits.damage)
    return int(beyond[0]) if beyond.size else len(steps.row)
