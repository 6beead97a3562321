"""The plan queue between two planner steps: what its plans are good for."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Limits
from pagedweight.runtime.planner import Plan, Queue, plan_from_queue, plan_step
from pagedweight.runtime.planner_scores import score_actions
from pagedweight.runtime.planner_stages import plans_for_targets
from pagedweight.runtime.table_view import TableSnapshot
from tests.runtime.planner_support import Problem, carried_out, parent_problem


def rows_of(plan: Plan) -> list[int]:
    return [transition.row for transition in plan.transitions]


def room_bytes(problem: Problem) -> int:
    return problem.held_bytes() - problem.floor_bytes()


@given(st.integers(0, 2**16), st.floats(0.01, 0.9), st.floats(0.01, 0.9))
def test_a_queue_leads_on_from_where_an_earlier_target_stopped(seed: int, first: float, second: float) -> None:
    """Two targets one after the other take what one of both together takes; from elsewhere the queue has nothing."""
    problem = parent_problem((6, 5), seed=seed)
    at, parent = np.arange(len(problem.table.committed)), problem.table.widths[-1]
    room = room_bytes(problem)
    queue, _ = plan_step(problem.table, problem.observation, problem.policy, Queue())

    def planned(table: TableSnapshot, target_bytes: int) -> Plan | None:
        return plan_from_queue(table, problem.under_pressure(target_bytes), problem.policy, queue)

    before = planned(problem.table, int(first * room) + 1)
    moved = carried_out(problem.table, before)
    target = int(second * (room - before.released_bytes)) + 1
    whole = planned(problem.table, before.released_bytes + target)
    after = planned(moved, target)
    if whole is None:
        assert after is None
        return
    assert after.released_bytes >= target
    assert after.released_bytes == whole.released_bytes - before.released_bytes
    assert math.isclose(after.damage, whole.damage - before.damage, rel_tol=1e-9, abs_tol=1e-12)
    assert (carried_out(moved, after).committed == carried_out(problem.table, whole).committed).all()
    if before.transitions:
        # A row that went back: only where its step was the last one is the table still on the queue's way.
        strayed = [moved._replace(committed=np.where(at == row, parent, moved.committed)) for row in rows_of(before)]
        assert sum(planned(table, target) is not None for table in strayed) <= 1


def test_a_row_in_transfer_elsewhere_leaves_the_queue_of_use() -> None:
    problem = parent_problem((6, 5))
    queue, _ = plan_step(problem.table, problem.observation, problem.policy, Queue())
    pressed = problem.under_pressure(2000)
    plan = plan_from_queue(problem.table, pressed, problem.policy, queue)
    for row in range(len(problem.table.committed)):
        busy = np.arange(len(problem.table.committed)) == row
        other = plan_from_queue(problem.table._replace(busy=busy), pressed, problem.policy, queue)
        assert (other == plan) == (row not in rows_of(plan)), row


def test_a_step_under_pressure_queues_smaller_targets_too_and_its_own_once() -> None:
    problem = parent_problem((6, 5))
    target = room_bytes(problem) // 2
    queue, _ = plan_step(problem.table, problem.under_pressure(target), problem.policy, Queue())
    targets = [queued.target_bytes for queued in queue.plans]
    assert targets.count(target) == 1
    assert min(targets) < target


def test_an_older_plan_that_costs_less_than_the_fresh_one_is_taken() -> None:
    """Where all rows cost nearly the same per byte the search is cut short: at other prices it can find better."""
    problem, rows = parent_problem((10,), (2, 4)), 20
    released = np.random.default_rng(10).integers(10**6, 2 * 10**6, rows)
    table = problem.table._replace(bytes=np.stack([np.full(rows, 128), 128 + released], axis=1))
    target = int(released.sum()) // 2
    pressed = problem.under_pressure(target)

    def priced(seed: int) -> Policy:
        price = released * (1 + 1e-6 * np.random.default_rng(seed).random(rows))
        return problem.policy.replaced(s_bar=np.stack([price, np.zeros(rows)], axis=1), m_cal=np.ones(rows))

    queue, _ = plan_step(table, problem.under_pressure(target + 1), priced(2), Queue())
    older = next(queued for queued in queue.plans if queued.target_bytes == target + 1)
    _, fresh = plan_step(table, pressed, priced(1), Queue())
    _, taken = plan_step(table, pressed, priced(1), queue)
    assert taken.damage < fresh.damage * (1 - 1e-4)
    assert rows_of(taken) == np.flatnonzero(older.reached() != older.start).tolist()


def test_a_queued_plan_beyond_a_damage_limit_that_was_set_since_is_not_taken() -> None:
    problem = parent_problem((6, 5))
    pressed = problem.under_pressure(room_bytes(problem) // 2)
    queue, plan = plan_step(problem.table, pressed, problem.policy, Queue())
    limited = pressed._replace(limits=Limits(damage=plan.damage / 2))
    _, after = plan_step(problem.table, limited, problem.policy, queue)
    assert after.damage <= plan.damage / 2
    assert after.shortfall_bytes > 0
    assert after == plan_step(problem.table, limited, problem.policy, Queue())[1]


def test_a_target_that_no_stage_meets_gets_the_most_that_the_loosest_releases() -> None:
    problem = parent_problem((6, 5))
    policy, room = problem.policy.replaced(floors=[[6], [3], [2]]), room_bytes(problem)
    scores = score_actions(problem.table, problem.observation, policy)
    plans, most = plans_for_targets(problem.table, problem.observation, policy, scores, [2 * room], 2 * room, 0)
    assert plans == []
    assert (most.stage, most.released_bytes) == (2, room)
