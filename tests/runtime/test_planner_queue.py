"""The plan queue between two planner steps: what its plans are good for."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.runtime.planner import Plan, Queue, plan_from_queue, plan_step
from pagedweight.runtime.table_view import TableSnapshot
from tests.runtime.planner_support import carried_out, parent_problem


def rows(plan: Plan) -> list[int]:
    return [transition.row for transition in plan.transitions]


@given(st.integers(0, 2**16), st.floats(0.01, 0.9), st.floats(0.01, 0.9))
def test_a_queue_leads_on_from_where_an_earlier_target_stopped(seed: int, first: float, second: float) -> None:
    """Two targets one after the other take what one of both together takes; from elsewhere the queue has nothing."""
    problem = parent_problem((6, 5), seed=seed)
    at, parent = np.arange(len(problem.table.committed)), problem.table.widths[-1]
    room = problem.held_bytes() - problem.floor_bytes()
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
        strayed = [moved._replace(committed=np.where(at == row, parent, moved.committed)) for row in rows(before)]
        assert sum(planned(table, target) is not None for table in strayed) <= 1


def test_a_row_in_transfer_elsewhere_leaves_the_queue_of_use() -> None:
    problem = parent_problem((6, 5))
    queue, _ = plan_step(problem.table, problem.observation, problem.policy, Queue())
    pressed = problem.under_pressure(2000)
    plan = plan_from_queue(problem.table, pressed, problem.policy, queue)
    for row in range(len(problem.table.committed)):
        busy = np.arange(len(problem.table.committed)) == row
        other = plan_from_queue(problem.table._replace(busy=busy), pressed, problem.policy, queue)
        assert (other == plan) == (row not in rows(plan)), row


def test_a_step_under_pressure_queues_smaller_targets_too_and_its_own_once() -> None:
    problem = parent_problem((6, 5))
    target = (problem.held_bytes() - problem.floor_bytes()) // 2
    queue, _ = plan_step(problem.table, problem.under_pressure(target), problem.policy, Queue())
    targets = [queued.target_bytes for queued in queue.plans]
    assert targets.count(target) == 1
    assert min(targets) < target
