"""plan_step: what Algorithm 1 must hold for any table, policy and observation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState, target_bytes
from pagedweight.runtime.observe import Limits
from pagedweight.runtime.planner import Plan, Queue, initial_bits, plan_step, release_target_bytes
from pagedweight.runtime.planner_baselines import without_routing
from pagedweight.runtime.planner_buckets import PRIOR_TOKENS, expert_buckets, routing_of
from pagedweight.runtime.planner_queue import QueuedPlan, select_best_plan
from pagedweight.runtime.planner_scores import parent_damage, prompt_factor, score_actions
from tests.runtime.planner_support import (
    Problem,
    carried_out,
    layout_of,
    named,
    observation_of,
    parent_problem,
    policy_of,
    problems,
    random_problem,
    table_of,
)

PER_ROW = ("blocks", "s_bar", "m_cal", "feature_center")
targets = st.floats(0, 1.2)


def planned(problem: Problem, target: int) -> Plan:
    return plan_step(problem.table, problem.under_pressure(target), problem.policy, Queue())[1]


def lowest_widths(problem: Problem, stage: int, level: int) -> np.ndarray:
    """(R,) lowest width allowed to each row, spelled out row by row."""
    table, policy, pins = problem.table, problem.policy, problem.observation.limits.lowest_bits
    bucket = routing_of(problem.observation, policy).bucket
    lowest = []
    for row, committed in enumerate(table.committed):
        deepest = max(0, table.widths.index(committed) - policy.depth_caps[level, bucket[row]])
        floor = max(policy.floors[stage, bucket[row]], table.widths[deepest], 0 if pins is None else pins[row])
        lowest.append(committed if table.busy[row] else min(floor, committed))
    return np.array(lowest)


def most_bytes(problem: Problem, lowest: np.ndarray) -> int:
    held = np.searchsorted(problem.table.widths, problem.table.committed)
    rows = np.arange(len(held))
    return int(
        (
            problem.table.bytes[rows, held] - problem.table.bytes[rows, np.searchsorted(problem.table.widths, lowest)]
        ).sum()
    )


@settings(max_examples=150)
@given(problems, targets)
def test_a_plan_meets_its_target_or_says_what_it_lacks(problem: Problem, share: float) -> None:
    target = 1 + int(share * (problem.held_bytes() - problem.floor_bytes()))
    plan = planned(problem, target)
    assert plan.released_bytes == sum(t.bytes for t in plan.transitions)
    assert plan.shortfall_bytes == max(0, target - plan.released_bytes)
    after = carried_out(problem.table, plan)
    assert problem.held_bytes() - problem._replace(table=after).held_bytes() == plan.released_bytes
    damage = score_actions(problem.table, problem.observation, problem.policy).damage
    by_hand = sum(damage[problem.table.widths.index(t.to_bits), t.row] for t in plan.transitions)
    assert np.isclose(plan.damage, by_hand, rtol=1e-9)


@settings(max_examples=150)
@given(problems, targets)
def test_floors_caps_and_pins_loosen_only_as_far_as_needed(problem: Problem, share: float) -> None:
    """The plan stays within the strictest stage and caps that can provide the target; pins and transfers always."""
    target = 1 + int(share * (problem.held_bytes() - problem.floor_bytes()))
    plan = planned(problem, target)
    for stage, level in np.ndindex(len(problem.policy.floors), len(problem.policy.depth_caps)):
        lowest = lowest_widths(problem, stage, level)
        if most_bytes(problem, lowest) >= target:
            break
    else:
        assert plan.released_bytes == most_bytes(problem, lowest), "not the largest reduction"
    assert all(t.to_bits >= lowest[t.row] for t in plan.transitions)
    assert all(t.lowers and not problem.table.busy[t.row] for t in plan.transitions)


@settings(max_examples=150)
@given(problems, targets, targets)
def test_a_larger_target_never_releases_less(problem: Problem, one: float, other: float) -> None:
    span = problem.held_bytes() - problem.floor_bytes()
    small, large = sorted(1 + int(share * span) for share in (one, other))
    assert planned(problem, small).released_bytes <= planned(problem, large).released_bytes


@settings(max_examples=60)
@given(problems, targets, st.randoms(use_true_random=False))
def test_row_order_does_not_matter(problem: Problem, share: float, random: object) -> None:
    target = 1 + int(share * (problem.held_bytes() - problem.floor_bytes()))
    order = np.array(random.sample(range(problem.policy.rows), problem.policy.rows))
    seen, table = problem.observation, problem.table
    shuffled = Problem(
        type(table)(table.widths, *(column[order] for column in table[1:])),
        seen._replace(
            features=None if seen.features is None else seen.features[order],
            confidence=None if seen.confidence is None else seen.confidence[order],
            limits=Limits(lowest_bits=None if seen.limits.lowest_bits is None else seen.limits.lowest_bits[order]),
        ),
        problem.policy.replaced(**{name: getattr(problem.policy, name)[order] for name in PER_ROW}),
    )
    plan, other = planned(problem, target), planned(shuffled, target)
    assert named(table, plan) == named(shuffled.table, other)
    assert plan[1:] == other[1:]


@settings(max_examples=60)
@given(problems)
def test_without_pressure_the_plan_is_empty_and_the_queue_fresh(problem: Problem) -> None:
    queue = Queue()
    for step in range(3):
        queue, plan = plan_step(problem.table, problem.observation, problem.policy, queue)
        assert plan == Plan()
        assert queue.step == step + 1
        assert all(p.made_at == step for p in queue.plans)
    last = lowest_widths(problem, -1, -1)
    assert bool(queue.plans) == (most_bytes(problem, last) > 0)
    if queue.plans:
        assert queue.plans[-1].released_bytes == most_bytes(problem, last)
    assert all(p.released_bytes >= p.target_bytes for p in queue.plans)


@settings(max_examples=60)
@given(problems, targets)
def test_the_same_step_gives_the_same_plan(problem: Problem, share: float) -> None:
    """case_99: two ranks that agree on the least F plan alike, with nothing else exchanged."""
    target = 1 + int(share * problem.held_bytes())

    queue, _ = plan_step(problem.table, problem.observation, problem.policy, Queue())
    seen = problem.under_pressure(target)
    assert plan_step(problem.table, seen, problem.policy, queue)[1] == planned(problem, target)


def test_a_queued_plan_serves_while_it_is_valid_and_not_after() -> None:
    problem = parent_problem((4, 4))
    queue, _ = plan_step(problem.table, problem.observation, problem.policy, Queue())
    moved = problem.table._replace(committed=np.full(16, 3), desired=np.full(16, 3))
    queue, plan = plan_step(moved, problem.under_pressure(500), problem.policy, queue)
    assert plan.transitions
    assert all(t.from_bits == 3 for t in plan.transitions)
    assert all(p.made_at == 1 for p in queue.plans), "plans from widths that are gone stay in the queue"


def test_older_plans_are_priced_as_of_now_and_ties_go_to_the_newest() -> None:
    problem = parent_problem((4, 4))
    seen = problem.under_pressure(9000)
    old, _ = plan_step(problem.table, seen, problem.policy, Queue())
    new, _ = plan_step(problem.table, seen, problem.policy, Queue(step=1))
    older, newer = (next(p for p in queue.plans if p.target_bytes == 9000) for queue in (old, new))

    def best(policy: Policy) -> QueuedPlan | None:
        scores = score_actions(problem.table, seen, policy)
        return select_best_plan([older, newer], scores, problem.table, seen, policy, 9000, (0, 0))

    assert best(problem.policy) is newer
    moved = np.flatnonzero(older.reached() != older.start)
    cheaper, dearer = (problem.policy.s_bar.copy() for _ in range(2))
    cheaper[moved] *= 0.5
    dearer[moved] *= 2.0
    assert best(problem.policy.replaced(s_bar=cheaper)) is older
    assert best(problem.policy.replaced(s_bar=dearer)) is newer
    assert best(problem.policy.replaced(s_bar=cheaper, floors=[[6]])) is newer, "its floor is gone: no longer valid"


def test_target_is_equation_7_with_forecast_in_flight_and_weight_limit() -> None:
    problem = parent_problem((2, 2))
    seen = problem.observation._replace(kv=KVState(5, 100), threshold_blocks=8)
    d = max(0, 8 + 1 - 5) * 100
    assert release_target_bytes(problem.table, seen) == d == target_bytes(seen.kv, 8)
    assert release_target_bytes(problem.table, seen._replace(forecast_blocks=3)) == d + 300
    assert release_target_bytes(problem.table, seen._replace(in_flight_bytes=150)) == d - 150
    assert release_target_bytes(problem.table, seen._replace(in_flight_bytes=10**6)) == 0
    limited = seen._replace(in_flight_bytes=10**6, limits=Limits(weight_bytes=problem.held_bytes() - 42))
    assert release_target_bytes(problem.table, limited) == 42


def test_the_forecast_frees_memory_before_pressure() -> None:
    problem = parent_problem((4, 4))
    calm = problem.observation._replace(kv=KVState(20, 128), threshold_blocks=8)
    assert plan_step(problem.table, calm, problem.policy, Queue())[1] == Plan()
    _, plan = plan_step(problem.table, calm._replace(forecast_blocks=15), problem.policy, Queue())
    assert plan.released_bytes >= 4 * 128


@settings(max_examples=60)
@given(problems, targets)
def test_bytes_in_flight_are_not_planned_twice(problem: Problem, share: float) -> None:
    target = 1 + int(share * (problem.held_bytes() - problem.floor_bytes()))
    plan = planned(problem, target)
    stale = problem.under_pressure(target)._replace(in_flight_bytes=plan.released_bytes)
    after = carried_out(problem.table, plan)
    if plan.shortfall_bytes == 0:
        assert plan_step(after, stale, problem.policy, Queue())[1] == Plan()


def test_case_88_a_target_out_of_reach_is_planned_once() -> None:
    problem = parent_problem((4, 4))
    span = problem.held_bytes() - problem.floor_bytes()
    table, queue, plans = problem.table, Queue(), []
    for _ in range(1000):
        queue, plan = plan_step(table, problem.under_pressure(10 * span), problem.policy, queue)
        table = carried_out(table, plan)
        plans.append(plan)
    assert plans[0].released_bytes == span
    assert plans[0].shortfall_bytes == 9 * span
    assert all(plan == Plan(shortfall_bytes=10 * span) for plan in plans[1:])


def test_case_84_memory_taken_by_another_is_planned_again() -> None:
    """The observation said 71 blocks are free; by the time of the allocation there are fewer, and fewer again."""
    problem = parent_problem((4, 4))
    table, queue = problem.table, Queue()
    for free in (71, 60, 40):
        seen = problem.observation._replace(kv=KVState(free, 32), threshold_blocks=75)
        queue, plan = plan_step(table, seen, problem.policy, queue)
        assert plan.released_bytes >= (76 - free) * 32
        table = carried_out(table, plan)


def test_case_41_ties_go_by_layer_expert_and_projection() -> None:
    problem = parent_problem((3, 3), (2, 4))
    equal = problem.policy.replaced(s_bar=np.tile([2.0, 1.0], (12, 1)), m_cal=np.ones(12))
    table = problem.table._replace(bytes=np.tile([100, 200], (12, 1)))
    _, plan = plan_step(table, problem.under_pressure(500), equal, Queue())
    assert [t.row for t in plan.transitions] == [0, 1, 2, 3, 4]


def test_case_10_more_experts_than_a_byte_counts() -> None:
    rng = np.random.default_rng(0)
    layout = layout_of((512,), (2, 4))
    problem = Problem(
        table_of(layout, rng),
        observation_of(layout, rng, signals=True, pins=False),
        policy_of(layout, rng, buckets=3).replaced(floors=[[2, 2, 2]], depth_caps=[[1, 1, 1]]),
    )
    span = problem.held_bytes() - problem.floor_bytes()
    assert {t.row for t in planned(problem, span).transitions} == set(range(1024))
    hot = (np.arange(512) == 300).astype(float)
    live = problem.observation._replace(mass=hot[None]), problem.policy
    calibrated = problem.observation._replace(mass=None), problem.policy.replaced(m_cal=np.repeat(hot, 2))
    for observation, policy in (live, calibrated):
        routing = routing_of(observation, policy)
        assert np.flatnonzero(routing.bucket == 2).tolist() == [600, 601]
        assert np.flatnonzero(routing.mass).tolist() == [600, 601]


def test_case_45_experts_without_tokens_share_the_coldest_bucket() -> None:
    mass = np.array([[0, 0, 1.0, 0, 0, 0, 0, 0]])
    bucket = expert_buckets(mass, np.ones_like(mass, dtype=bool), np.array([0.25, 0.5, 0.75]))
    assert bucket.tolist() == [[0, 0, 3, 0, 0, 0, 0, 0]]


@given(st.integers(0, 2**32 - 1))
def test_buckets_count_strictly_colder_experts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mass = rng.integers(0, 4, (2, 5)) / 3
    exists = np.arange(5) < rng.integers(1, 6, (2, 1))
    edges = np.array([0.3, 0.6])
    bucket = expert_buckets(mass, exists, edges)
    for layer, expert in np.argwhere(exists):
        colder = (mass[layer][exists[layer]] < mass[layer, expert]).mean()
        assert bucket[layer, expert] == (colder >= edges).sum()


def test_hot_experts_are_spared() -> None:
    """The same blocks, routed the other way round, are lowered the other way round."""
    problem = parent_problem((4,), (2, 4))
    equal = problem.policy.replaced(
        s_bar=np.tile([2.0, 1.0], (8, 1)),
        m_cal=np.ones(8),
        bucket_edges=[0.5],
        multipliers=[1.0, 3.0],
        floors=[[2, 2]],
        depth_caps=[[1, 1]],
    )
    table = problem.table._replace(bytes=np.tile([100, 200], (8, 1)))
    for mass, lowered in (([0.4, 0.4, 0.1, 0.1], {4, 5, 6, 7}), ([0.1, 0.1, 0.4, 0.4], {0, 1, 2, 3})):
        seen = problem.under_pressure(400)._replace(mass=np.array([mass]))
        assert {t.row for t in plan_step(table, seen, equal, Queue())[1].transitions} == lowered


@settings(max_examples=60)
@given(problems, st.floats(0, 1), st.none() | st.integers(0, 2000))
def test_damage_is_equation_8_with_live_and_calibrated_mass_blended(
    problem: Problem, trust: float, routed: int | None
) -> None:
    """Row by row: s is s_bar times m, which moves from m_cal towards the live mass as tokens are counted."""
    table, policy = problem.table, problem.policy.replaced(mass_trust=trust, alpha=0.0)
    layers = int(table.layer.max()) + 1
    seen = problem.observation._replace(routed=None if routed is None else np.full(layers, float(routed)))
    damage, routing = score_actions(table, seen, policy).damage, routing_of(seen, policy)
    for row, at in enumerate(np.searchsorted(table.widths, table.committed)):
        layer, m_cal = table.layer[row], policy.m_cal[row]
        weight, m = 0.0, m_cal
        if seen.mass is not None and seen.mass[layer].sum() > 0:
            weight = trust if routed is None else trust * routed / (routed + PRIOR_TOKENS)
            of_layer = policy.m_cal[(table.layer == layer) & (table.projection == 0)].sum()
            m = (1 - weight) * m_cal + weight * of_layer * seen.mass[layer, table.expert[row]]
        assert np.isclose(routing.mass[row], m)
        for to in range(at):
            g = max(policy.s_bar[row, to] * m - policy.s_bar[row, at] * m, 0.0)
            assert np.isclose(damage[to, row], max(policy.epsilon, routing.multiplier[row] * g), rtol=1e-9)


def test_what_this_input_routes_to_is_spared_without_any_multiplier() -> None:
    """Of two experts that calibration found alike, the one that the requests use keeps its bits."""
    problem = parent_problem((4,), (2, 4))
    equal = problem.policy.replaced(s_bar=np.tile([2.0, 1.0], (8, 1)), m_cal=np.full(8, 0.25))
    table = problem.table._replace(bytes=np.tile([100, 200], (8, 1)))
    seen = problem.under_pressure(400)._replace(mass=np.array([[0.4, 0.1, 0.4, 0.1]]))
    assert {t.row for t in plan_step(table, seen, equal, Queue())[1].transitions} == {2, 3, 6, 7}
    for blind in (equal.replaced(mass_trust=0.0), without_routing(equal)):
        assert {t.row for t in plan_step(table, seen, blind, Queue())[1].transitions} == {0, 1, 2, 3}
    unsure = seen._replace(routed=np.zeros(1))
    assert {t.row for t in plan_step(table, unsure, equal, Queue())[1].transitions} == {0, 1, 2, 3}


@settings(max_examples=60)
@given(problems, st.booleans())
def test_the_prompt_factor_is_equations_5_and_6_from_either_end(problem: Problem, raising: bool) -> None:
    table, policy, seen = problem.table, problem.policy, problem.observation
    anchor = np.searchsorted(table.widths, table.committed)
    factor = prompt_factor(table, seen, policy, anchor, raising=raising)
    if seen.features is None:
        assert factor == 1.0
        return
    for row, at in enumerate(anchor):
        for place, other in enumerate(range(1, len(table.widths)) if raising else range(len(table.widths) - 1)):
            head = (table.projection[row], *((other, at) if raising else (at, other)))
            rho = policy.head_weights[head] @ (seen.features[row] - policy.feature_center[row]) + policy.head_bias[head]
            c = policy.head_confidence[head] * seen.confidence[row]
            eta = np.exp(policy.alpha * c * np.clip(rho, policy.rho_min, policy.rho_max))
            assert np.isclose(factor[place, row], eta, rtol=1e-9)


def test_a_prompt_that_is_sensitive_somewhere_is_spared_there() -> None:
    problem = parent_problem((2,), (2, 4))
    equal = problem.policy.replaced(
        s_bar=np.tile([2.0, 1.0], (4, 1)),
        m_cal=np.ones(4),
        head_weights=np.ones((2, 2, 2, 3)),
        head_bias=np.zeros((2, 2, 2)),
        head_confidence=np.ones((2, 2, 2)),
        alpha=1.0,
    )
    table = problem.table._replace(bytes=np.tile([100, 200], (4, 1)))
    features = np.zeros((4, 3))
    features[0] = 0.2
    seen = problem.under_pressure(300)._replace(features=features)
    assert [t.row for t in plan_step(table, seen, equal, Queue())[1].transitions] == [1, 2, 3]
    unsure = seen._replace(confidence=np.array([0.0, 1, 1, 1]))
    assert [t.row for t in plan_step(table, unsure, equal, Queue())[1].transitions] == [0, 1, 2]


def test_case_40_features_that_are_not_finite_change_nothing() -> None:
    problem = random_problem(11)._replace(policy=parent_problem((3, 2)).policy.replaced(alpha=1.0))
    problem = problem._replace(table=parent_problem((3, 2)).table)
    features = np.full((10, 3), np.nan)
    seen = problem.under_pressure(700)._replace(mass=None, features=features, confidence=None, limits=Limits())
    _, plan = plan_step(problem.table, seen, problem.policy, Queue())
    assert plan == plan_step(problem.table, seen._replace(features=None), problem.policy, Queue())[1]


@settings(max_examples=60)
@given(problems, st.floats(0, 1))
def test_the_damage_limit_is_never_passed(problem: Problem, share: float) -> None:
    """From the parent width the plans' own damage counts; what it does not allow is reported as shortfall."""
    parent = np.full(len(problem.table.committed), problem.table.widths[-1])
    problem = problem._replace(table=problem.table._replace(committed=parent, desired=parent))
    target = max(1, problem.held_bytes() - problem.floor_bytes())
    limit = share * planned(problem, target).damage
    limits = problem.observation.limits._replace(damage=limit)
    table, spent = problem.table, 0.0
    for part in (3, 2, 1):
        seen = problem.under_pressure(max(1, target // part))._replace(limits=limits)
        _, plan = plan_step(table, seen, problem.policy, Queue())
        table = carried_out(table, plan)
        spent = (
            score_actions(problem.table, seen, problem.policy)
            .damage[np.searchsorted(table.widths, table.committed), np.arange(len(parent))][table.committed < parent]
            .sum()
        )
        assert spent <= limit * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 1.2])
@pytest.mark.parametrize("seed", range(4))
def test_a_damage_limit_leaves_the_best_of_all_plans(seed: int, share: float) -> None:
    """Of every combination of widths, tried one by one: the least damage for the target, or the most bytes."""
    problem = parent_problem((2, 2), (2, 3, 5), seed)
    committed, rows = np.array([5, 5, 3, 5, 5, 3, 5, 5]), np.arange(8)
    problem = problem._replace(table=problem.table._replace(committed=committed, desired=committed))
    scores = score_actions(problem.table, problem.observation, problem.policy)
    combinations = np.array(list(itertools.product(*(range(at + 1) for at in scores.committed))))
    released = scores.released[combinations, rows].sum(axis=1)
    against_parent = parent_damage(problem.table, problem.observation, problem.policy)
    damage = against_parent[combinations, rows].sum(axis=1)
    now = against_parent[scores.committed, rows].sum()
    limit = now + share * (damage.max() - now)
    allowed = damage <= limit
    for target in (released.max() // 5, released.max() // 2, released.max()):
        seen = problem.under_pressure(int(target))._replace(limits=Limits(damage=limit))
        _, plan = plan_step(problem.table, seen, problem.policy, Queue())
        meeting = allowed & (released >= target)
        assert plan.shortfall_bytes == target - min(target, plan.released_bytes)
        if meeting.any():
            assert plan.released_bytes >= target
            assert np.isclose(plan.damage, damage[meeting].min() - now)
        else:
            assert plan.released_bytes == released[allowed].max()
            assert plan.damage <= (limit - now) * (1 + 1e-9)


@settings(max_examples=100)
@given(problems, st.floats(0, 1))
def test_initial_widths_fit_the_budget_or_say_what_does(problem: Problem, share: float) -> None:
    least, parent = most_saving(problem), int(problem.table.bytes[:, -1].sum())
    budget = least + int(share * (parent - least))
    bits = initial_bits(problem.table, problem.policy, budget, problem.observation)
    assert problem._replace(table=problem.table._replace(committed=bits)).held_bytes() <= budget
    assert np.isin(bits, problem.table.widths).all()
    assert budget < parent or (bits == problem.table.widths[-1]).all()
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        initial_bits(problem.table, problem.policy, least - 1, problem.observation)


def most_saving(problem: Problem) -> int:
    """Bytes held with every row, from the parent width, as low as floors, caps and pins ever allow."""
    parent = np.full(problem.policy.rows, problem.table.widths[-1])
    start = problem._replace(table=problem.table._replace(committed=parent, busy=np.zeros(len(parent), dtype=bool)))
    return start.held_bytes() - most_bytes(start, lowest_widths(start, -1, -1))


def test_a_policy_for_another_model_is_refused() -> None:
    problem, other = parent_problem((2, 2)), parent_problem((3,))
    with pytest.raises(ValueError, match="calibrate for this checkpoint"):
        plan_step(problem.table, problem.observation, other.policy, Queue())
    with pytest.raises(ValueError, match="routing mass has shape"):
        plan_step(problem.table, problem.observation._replace(mass=np.ones((2, 1))), problem.policy, Queue())
