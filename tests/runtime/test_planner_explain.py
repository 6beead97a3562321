"""Explanations agree with the plans they explain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.runtime.observe import Limits
from pagedweight.runtime.planner import Queue, plan_raise, plan_step
from pagedweight.runtime.planner_explain import explain, outlook
from pagedweight.runtime.planner_scores import parent_damage, score_actions
from tests.runtime.planner_support import Problem, carried_out, parent_problem, problems


@settings(max_examples=40)
@given(problems, st.integers(1, 5000))
def test_a_dry_run_is_the_plan_that_would_be_made(problem: Problem, bytes_: int) -> None:
    ahead = outlook(problem.table, problem.observation, problem.policy, bytes_)
    _, plan = plan_step(problem.table, problem.under_pressure(bytes_), problem.policy, Queue())
    assert ahead.lowering == plan
    assert ahead.raising == plan_raise(problem.table, problem.observation, problem.policy, bytes_)
    assert str(bytes_) in str(ahead)


@settings(max_examples=40)
@given(problems, st.integers(0, 10**6))
def test_prices_are_damage_per_byte(problem: Problem, number: int) -> None:
    table, row = problem.table, number % problem.policy.rows
    why = explain(table, problem.observation, problem.policy, row)
    index = table.widths.index(table.committed[row])
    assert (why.bits, why.parent_bits) == (table.committed[row], table.widths[-1])
    assert why.damage == parent_damage(table, problem.observation, problem.policy)[index, row]
    assert why.bytes == table.bytes[row, -1] - table.bytes[row, index]
    assert why.cheapest_price <= why.next_price
    assert str(why.bits) in str(why)


def test_the_cheapest_step_is_the_one_a_small_target_takes() -> None:
    problem = parent_problem((6, 6))
    _, plan = plan_step(problem.table, problem.under_pressure(1), problem.policy, Queue())
    (move,) = plan.transitions
    why = explain(problem.table, problem.observation, problem.policy, move.row)
    assert why.price == 0.0
    scores = score_actions(problem.table, problem.observation, problem.policy)
    assert why.next_price == (scores.damage[:-1, move.row] / scores.released[:-1, move.row]).min()
    after = carried_out(problem.table, plan)
    lowered = explain(after, problem.observation, problem.policy, move.row)
    assert lowered.damage == plan.damage
    assert lowered.bytes == move.bytes
    assert f"lowered from {move.from_bits} to {move.to_bits} bits" in str(lowered)


def test_what_binds_is_named() -> None:
    problem = parent_problem((2,))
    policy = problem.policy.replaced(floors=[[4], [3]], depth_caps=[[1], [2]])
    pinned = problem.observation._replace(limits=Limits(lowest_bits=np.array([6, 2, 2, 2])))
    busy = problem.table._replace(busy=np.array([False, True, False, False]))
    first, second, third = (explain(busy, pinned, policy, row).limits for row in range(3))
    assert first == (
        "bucket 0's floors of 4, 3 bits by stage",
        "bucket 0's depth caps of 1, 2 widths a plan by level",
        "a pin at 6 bits",
    )
    assert second[0] == "a transfer in progress"
    assert len(third) == 2
    assert explain(problem.table, problem.observation, problem.policy, 0).limits == ()


def test_a_row_that_does_not_exist_is_refused() -> None:
    problem = parent_problem((2,))
    with pytest.raises(ValueError, match="rows 0 to 3"):
        explain(problem.table, problem.observation, problem.policy, 4)
