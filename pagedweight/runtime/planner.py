"""The runtime planner, Algorithm 1: which linear-blocks give up bits so that the KV cache gets its bytes.

Everything here is a pure function of the page table, one step's observation, the offline policy and the queue.
"""

from __future__ import annotations

import math

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime import kv
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_queue import (
    EMPTY_PLAN,
    Plan,
    Queue,
    ladder,
    refresh_plan_queue,
    select_best_plan,
    transitions,
)
from pagedweight.runtime.planner_raising import plan_raise
from pagedweight.runtime.planner_scores import canonical, committed_index, lowest_index, score_actions
from pagedweight.runtime.planner_stages import largest_release, plans_for_targets
from pagedweight.runtime.table_view import TableSnapshot

__all__ = [
    "EMPTY_PLAN",
    "Plan",
    "Queue",
    "initial_bits",
    "initial_plan",
    "plan_from_queue",
    "plan_raise",
    "plan_step",
    "release_target_bytes",
]


def plan_step(table: TableSnapshot, observation: Observation, policy: Policy, queue: Queue) -> tuple[Queue, Plan]:
    """One step of Algorithm 1: the refreshed queue, and the plan Pi, which stays empty until there is pressure.

    The plan releases at least the target, or as much as floors, pins and the damage limit allow, with shortfall_bytes.
    Floors and caps loosen, stage by stage and level by level, only where stricter ones cannot provide the target.
    ValueError when the policy does not fit the table.
    """
    table, observation, policy, names = canonical(table, observation, policy)
    target = release_target_bytes(table, observation)
    scores = score_actions(table, observation, policy)
    loosest = lowest_index(scores, table, observation, policy, -1, -1)
    targets = ladder(observation.kv.block_bytes, largest_release(scores, loosest))
    if target:
        targets.append(target)
    fresh, best = plans_for_targets(table, observation, policy, scores, targets, target, queue.step)
    queue = refresh_plan_queue(queue, fresh, scores)
    if target == 0 or best is None:
        return queue, EMPTY_PLAN._replace(shortfall_bytes=target)
    if best.released_bytes >= target:
        strictest = (best.stage, best.level)
        best = select_best_plan(queue.plans, scores, table, observation, policy, target, strictest) or best
    moves = transitions(table, best.start, best.reached(), names)
    return queue, Plan(moves, best.damage, best.released_bytes, max(0, target - best.released_bytes))


def plan_from_queue(table: TableSnapshot, observation: Observation, policy: Policy, queue: Queue) -> Plan | None:
    """Lines 10 to 13 of Algorithm 1 alone: Pi for the present target from the queue as it is, in a fraction of a step.

    Queued plans are prefixes of their steps, so each serves every target up to its own, and goes on from where an
    earlier target stopped. None when no plan of the queue leads on from the present widths and provides the target, or
    a damage limit is set: then plan_step has to be asked.
    """
    names = None
    if not policy.experts.in_order:  # the queue was made of rows in order
        table, observation, _, names = canonical(table, observation, policy)
    target = release_target_bytes(table, observation)
    if target == 0:
        return EMPTY_PLAN
    if observation.limits.damage < math.inf:
        return None
    committed = committed_index(table)
    by_steps = {id(plan.steps): plan for plan in queue.plans}  # plans of one stage and step share theirs
    for plan in sorted(by_steps.values(), key=lambda plan: (plan.stage, plan.level, -plan.made_at)):
        taken = plan.steps.taken(plan.start, committed)
        if taken is None or (plan.whole and taken):
            continue
        (released_before, damage_before), count = plan.steps.totals(taken), plan.steps.meeting(target, taken)
        released, damage = plan.steps.totals(count)
        if released - released_before < target:
            continue
        if plan.whole:
            return None
        reached = plan.steps.reached(plan.start, count)
        if not table.busy[reached != committed].any():
            moves = transitions(table, committed, reached, names)
            return Plan(moves, damage - damage_before, released - released_before, 0)
    return None


def release_target_bytes(table: TableSnapshot, observation: Observation) -> int:
    """D: bytes that weights must release now, from KV pressure (Eq. 7), the forecast and the weight limit.

    Bytes in flight are on their way to the KV cache and count as released; the page table shows them already.
    """
    state = observation.kv
    expected = state._replace(pending_blocks=state.pending_blocks + observation.forecast_blocks)
    pressure = kv.target_bytes(expected, observation.threshold_blocks) - observation.in_flight_bytes
    limit = observation.limits.weight_bytes
    over_limit = 0 if limit is None else held_bytes(table) - limit
    return max(0, pressure, over_limit)


def held_bytes(table: TableSnapshot) -> int:
    """Bytes of every row at its committed width."""
    return int(table.bytes[np.arange(len(table.committed)), committed_index(table)].sum())


def initial_bits(
    table: TableSnapshot,
    policy: Policy,
    budget_bytes: int,
    observation: Observation | None = None,
) -> np.ndarray:
    """(R,) widths within budget_bytes before serving: the same greedy from the parent width, without pressure.

    observation: live signals and limits, if any. ValueError when even the lowest permitted widths do not fit.
    """
    start, plan = initial_plan(table, policy, budget_bytes, observation or Observation(kv.KVState(0, 1)))
    if plan.shortfall_bytes:
        least = held_bytes(start) - plan.released_bytes
        raise ValueError(
            f"the expert weights need at least {least} bytes at their lowest permitted widths; the budget for them is "
            f"{budget_bytes}: give more, or loosen floors, pins or the damage limit"
        )
    bits = start.committed.copy()
    for transition in plan.transitions:
        bits[transition.row] = transition.to_bits
    return bits


def initial_plan(
    table: TableSnapshot, policy: Policy, budget_bytes: int, observation: Observation
) -> tuple[TableSnapshot, Plan]:
    """Every row at rest at the parent width, and the plan from there to budget_bytes, with its shortfall."""
    rows = len(table.committed)
    parent = np.full(rows, table.widths[-1])
    start = table._replace(committed=parent, desired=parent, busy=np.zeros(rows, dtype=bool))
    limits = observation.limits._replace(weight_bytes=budget_bytes)
    idle = observation._replace(kv=kv.KVState(1, 1), threshold_blocks=0, forecast_blocks=0, limits=limits)
    return start, plan_step(start, idle, policy, Queue())[1]
