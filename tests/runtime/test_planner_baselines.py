"""Baselines choose what their rules say, within the same budgets and behind the same interface."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.runtime.kv import KVState
from pagedweight.runtime.planner import Queue, initial_bits
from pagedweight.runtime.planner_allocate import row_mass
from pagedweight.runtime.planner_baselines import (
    BASELINES,
    Baseline,
    hotness_tiers,
    layer_swap,
    static_mixed_by_layer,
    uniform,
    unmoving,
    without_residual,
    without_routing,
    without_sensitivity,
)
from pagedweight.runtime.planner_scores import parent_damage
from tests.runtime.planner_support import Problem, carried_out, parent_problem, problems

shares = st.floats(0, 1)


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.name)
@settings(max_examples=25)
@given(problem=problems, share=shares)
def test_initial_widths_fit_the_budget(baseline: Baseline, problem: Problem, share: float) -> None:
    parent = int(problem.table.bytes[:, -1].sum())
    budget = problem.floor_bytes() + int(share * (parent - problem.floor_bytes()))
    try:
        bits = baseline.initial_bits(problem.table, problem.observation, problem.policy, budget)
    except ValueError:
        # One layer's share of a total that fits may be below that layer's floor, and so may a policy's last stage be.
        assert baseline.choose in (static_mixed_by_layer, unmoving)
        return
    assert problem._replace(table=problem.table._replace(committed=bits)).held_bytes() <= budget
    assert budget < parent or (bits == problem.table.widths[-1]).all()


@pytest.mark.parametrize("baseline", [b for b in BASELINES if b.follows_pressure], ids=lambda b: b.name)
@settings(max_examples=25)
@given(problem=problems, share=shares)
def test_plans_meet_their_target_or_say_what_they_lack(baseline: Baseline, problem: Problem, share: float) -> None:
    target = 1 + int(share * (problem.held_bytes() - problem.floor_bytes()))
    _, plan = baseline.plan_step(problem.table, problem.under_pressure(target), problem.policy, Queue())
    assert plan.shortfall_bytes == max(0, target - plan.released_bytes)
    after = problem._replace(table=carried_out(problem.table, plan))
    assert problem.held_bytes() - after.held_bytes() == plan.released_bytes
    assert all(t.lowers and not problem.table.busy[t.row] for t in plan.transitions)
    if not problem.table.busy.any():
        assert plan.shortfall_bytes <= max(0, target - (problem.held_bytes() - problem.floor_bytes()))


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.name)
def test_without_pressure_nothing_moves(baseline: Baseline) -> None:
    problem = parent_problem((3, 3))
    calm = problem.observation._replace(kv=KVState(9, 64), threshold_blocks=8)
    assert baseline.plan_step(problem.table, calm, problem.policy, Queue())[1].transitions == ()


@pytest.mark.parametrize("name", ["static mixed", "static mixed by layer", "without page movement"])
def test_a_static_policy_answers_pressure_with_its_shortfall(name: str) -> None:
    problem = parent_problem((3, 3))
    static = next(b for b in BASELINES if b.name == name)
    _, plan = static.plan_step(problem.table, problem.under_pressure(700), problem.policy, Queue())
    assert (plan.transitions, plan.shortfall_bytes) == ((), 700)


def test_a_budget_below_the_floor_is_refused() -> None:
    problem = parent_problem((3, 3))
    with pytest.raises(ValueError, match="at the least"):
        BASELINES[0].initial_bits(problem.table, problem.observation, problem.policy, problem.floor_bytes() - 1)


def test_uniform_is_one_width() -> None:
    problem = parent_problem((3, 3))
    budget = int(problem.table.bytes[:, 1].sum()) + 10
    assert set(uniform(problem.table, problem.observation, problem.policy, budget)) == {1}


def test_tiers_are_whole_experts_hottest_first() -> None:
    problem = parent_problem((4,), (2, 4))
    seen = problem.observation._replace(mass=np.array([[0.1, 0.5, 0.2, 0.2]]))
    table = problem.table._replace(bytes=np.tile([100, 200], (8, 1)))
    assert hotness_tiers(table, seen, problem.policy, 1200).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert hotness_tiers(table, seen, problem.policy, 1150).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


def test_a_layer_is_swapped_whole() -> None:
    problem = parent_problem((2, 2, 2), (2, 4))
    table = problem.table._replace(bytes=np.tile([100, 200], (12, 1)))
    s_bar = np.stack([np.repeat([3.0, 1.0, 2.0], 4), np.zeros(12)], axis=1)
    policy = problem.policy.replaced(s_bar=s_bar, m_cal=np.ones(12))
    assert layer_swap(table, problem.observation, policy, 2000).tolist() == [1] * 4 + [0] * 4 + [1] * 4


@settings(max_examples=25)
@given(problems, shares)
def test_no_baseline_predicts_less_damage_than_the_planner(problem: Problem, share: float) -> None:
    """With nothing but sensitivity to go by, the planner's allocation is the optimum of its own objective."""
    policy = problem.policy.replaced(
        alpha=0.0,
        bucket_edges=np.empty(0),
        multipliers=np.ones(1),
        floors=[[problem.table.widths[0]]],
        depth_caps=[[9]],
    )
    plain = problem.observation._replace(mass=None, features=None, limits=type(problem.observation.limits)())
    parent = int(problem.table.bytes[:, -1].sum())
    budget = problem.floor_bytes() + int(share * (parent - problem.floor_bytes()))
    against_parent, rows = parent_damage(problem.table, plain, policy), np.arange(policy.rows)

    def damage(bits: np.ndarray) -> float:
        return float(against_parent[np.searchsorted(problem.table.widths, bits), rows].sum())

    ours = damage(initial_bits(problem.table, policy, budget, plain))
    for baseline in BASELINES:
        if baseline.choose is static_mixed_by_layer:
            continue
        theirs = damage(baseline.initial_bits(problem.table, plain, policy, budget))
        assert ours <= theirs * (1 + 1e-9), baseline.name


def test_ablations_lack_their_part_and_nothing_else() -> None:
    problem = parent_problem((4, 4))
    full = problem.policy.replaced(
        bucket_edges=[0.5], multipliers=[1.0, 2.0], floors=[[3, 4]], depth_caps=[[1, 2]], alpha=0.5
    )
    assert without_residual(full).alpha == 0.0
    routed = without_routing(full)
    assert (routed.multipliers.tolist(), routed.floors.tolist(), routed.depth_caps.tolist()) == ([1.0], [[3]], [[2]])
    blind = without_sensitivity(full)
    assert (blind.sensitivity[0::2] == blind.sensitivity[0]).all()
    assert (blind.sensitivity[1::2] == blind.sensitivity[1]).all()
    for ablated in (without_residual(full), blind):
        assert ablated.multipliers.tolist() == [1.0, 2.0]


def test_a_layer_that_nothing_has_reached_has_no_mass() -> None:
    problem = parent_problem((3, 3))
    m_cal = problem.policy.m_cal.copy()
    m_cal[:6] = 0
    mass = row_mass(problem.table, problem.observation, problem.policy.replaced(m_cal=m_cal))
    assert (mass[:6] == 0).all()
    assert mass[6:].sum() == pytest.approx(1)


def test_a_layer_is_swapped_for_what_a_byte_of_it_costs() -> None:
    problem = parent_problem((2, 2), (2, 4))
    large = problem.table.layer == 0
    table = problem.table._replace(bytes=np.where(large[:, None], [1000, 2000], [100, 200]))
    policy = problem.policy.replaced(s_bar=np.where(large[:, None], [2.0, 0.0], [1.0, 0.0]), m_cal=np.ones(8))
    index = layer_swap(table, problem.observation, policy, 4 * 1000 + 4 * 200)
    assert index.tolist() == (~large).tolist()
