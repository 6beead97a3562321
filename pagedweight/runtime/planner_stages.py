"""Bitwidth-floor stages and depth caps: which constraints a byte target needs loosened, and its plan under them."""

from __future__ import annotations

import math

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_cover import Change, cover, pack
from pagedweight.runtime.planner_greedy import Steps, hull_steps
from pagedweight.runtime.planner_queue import QueuedPlan
from pagedweight.runtime.planner_scores import Scores, lowest_index
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
    meets it. Constraints looser than it needs are left for the next step.
    """
    waiting, plans, largest, chosen = sorted(set(targets)), [], None, None
    limited = scores.most_damage < math.inf
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
        affordable = affordable_steps(steps, scores.most_damage)
        greedy_bytes, _ = steps.totals(affordable)

        def queued(target: int, change: Change) -> QueuedPlan:
            return QueuedPlan(stage, level, target, made_at, scores.committed, steps, change, everything)  # noqa: B023

        for target in [target for target in waiting if target <= greedy_bytes and target != urgent]:
            count = steps.meeting(target)
            plans.append(queued(target, Change(count, (), (), *steps.totals(count))))
        if urgent in waiting:
            change = _urgent_change(scores, lowest, steps, urgent, affordable, everything=everything)
            if change.bytes >= urgent:
                chosen = queued(urgent, change)
                plans.append(chosen)
            elif largest is None or change.bytes > largest.released_bytes:
                largest = queued(urgent, change)
        if chosen is not None:
            break  # its moves are made now: what looser constraints offer beyond it is planned from there, next time
        met = {plan.target_bytes for plan in plans}
        waiting = [target for target in waiting if target not in met]
    return plans, chosen or largest


def _urgent_change(
    scores: Scores, lowest: np.ndarray, steps: Steps, target_bytes: int, affordable: int, *, everything: bool
) -> Change:
    """The least damage for target_bytes or, where that cannot be had, the most bytes for the damage allowed."""
    greedy = Change(affordable, (), (), *steps.totals(affordable))
    if everything or (affordable == len(steps.row) and greedy.bytes < target_bytes):
        return greedy
    legal = _legal_damage(scores, lowest)
    totals = (steps, scores.committed, scores.released, legal)
    most = greedy if greedy.bytes >= target_bytes else pack(*totals, scores.most_damage, affordable)
    if most.bytes < target_bytes:
        return most
    least = cover(*totals, target_bytes, steps.meeting(target_bytes))
    return least if least.damage <= scores.most_damage else most


def lower_everything(scores: Scores, lowest: np.ndarray) -> Steps:
    """One step for each row that can be lowered, to the width index lowest (R,), by row."""
    row = np.flatnonzero(lowest < scores.committed)
    to = lowest[row]
    released, damage = np.cumsum(scores.released[to, row]), np.cumsum(scores.damage[to, row])
    return Steps(row, to, released, damage)


def largest_release(scores: Scores, lowest: np.ndarray) -> int:
    """Bytes that lowering every row to the width index lowest (R,) releases."""
    return int(scores.released[lowest, np.arange(len(lowest))].sum())


def legal_steps(scores: Scores, lowest: np.ndarray) -> Steps:
    """Steps within the moves that lowest (R,) permits."""
    width_index = np.arange(len(scores.released), dtype=np.int8)[:, None]
    legal = (width_index >= lowest.astype(np.int8)) & (width_index < scores.committed)
    return hull_steps(scores.released * legal, scores.damage)


def _legal_damage(scores: Scores, lowest: np.ndarray) -> np.ndarray:
    """(W, R), damage of the moves that lowest (R,) permits, 0 for staying, infinite otherwise."""
    width_index = np.arange(len(scores.released), dtype=np.int8)[:, None]
    legal = (width_index >= lowest.astype(np.int8)) & (width_index <= scores.committed)
    return np.where(legal, scores.damage, np.inf)


def affordable_steps(steps: Steps, most_damage: float) -> int:
    """Steps, cheapest first, that together cost at most most_damage."""
    if most_damage == math.inf:
        return len(steps.row)
    beyond = np.flatnonzero(steps.damage > most_damage)
    return int(beyond[0]) if beyond.size else len(steps.row)
