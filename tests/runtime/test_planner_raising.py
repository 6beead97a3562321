"""Raising as a plan: within its room, the most damage first, and no going to and fro."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits
from pagedweight.runtime.planner import Plan, Queue, initial_bits, plan_raise, plan_step
from pagedweight.runtime.planner_buckets import routing_of
from pagedweight.runtime.planner_raising import raise_points
from pagedweight.runtime.planner_scores import committed_index
from tests.runtime.planner_support import Problem, carried_out, parent_problem, problems

shares = st.floats(0, 1.1)


def parent_bytes(problem: Problem) -> int:
    return int(problem.table.bytes[:, -1].sum())


@settings(max_examples=100)
@given(problems, shares, st.integers(0, 8))
def test_raises_fit_their_room_and_wait_their_time(problem: Problem, share: float, dwell: int) -> None:
    room = int(share * (parent_bytes(problem) - problem.held_bytes()))
    seen = problem.observation._replace(limits=problem.observation.limits._replace(dwell_steps=dwell))
    plan = plan_raise(problem.table, seen, problem.policy, room)
    assert sum(t.bytes for t in plan.transitions) == -plan.released_bytes <= room
    for t in plan.transitions:
        assert not t.lowers
        assert not problem.table.busy[t.row]
        assert problem.table.since[t.row] >= dwell
    after = problem._replace(table=carried_out(problem.table, plan))
    assert after.held_bytes() - problem.held_bytes() == -plan.released_bytes
    _, recovered = raise_points(problem.table, seen, problem.policy, committed_index(problem.table))
    by_hand = -sum(recovered[problem.table.widths.index(t.to_bits), t.row] for t in plan.transitions)
    assert np.isclose(plan.damage, by_hand)
    assert plan.damage < 0 or not plan.transitions


@settings(max_examples=100)
@given(problems)
def test_with_room_for_all_everything_idle_comes_back(problem: Problem) -> None:
    plan = plan_raise(problem.table, problem.observation, problem.policy, parent_bytes(problem))
    after = carried_out(problem.table, plan)
    assert ((after.committed == problem.table.widths[-1]) | problem.table.busy).all()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_raise_takes_back_more(share: float) -> None:
    """Within a hundredth of the best of all fills, tried one by one."""
    problem = parent_problem((2, 2), (2, 3, 4))
    low = problem._replace(table=problem.table._replace(committed=np.array([2, 2, 3, 2, 2, 4, 2, 3])))
    room = int(share * (parent_bytes(low) - low.held_bytes()))
    plan = plan_raise(low.table, low.observation, low.policy, room)
    committed, rows = committed_index(low.table), np.arange(8)
    needed, recovered = raise_points(low.table, low.observation, low.policy, committed)
    fills = np.array(list(itertools.product(*(range(at, 3) for at in committed))))
    fits = needed[fills, rows].sum(axis=1) <= room
    assert -plan.damage >= 0.99 * recovered[fills, rows].sum(axis=1)[fits].max()


def test_the_limits_bound_a_raise() -> None:
    problem = parent_problem((4, 4))
    low = problem.table._replace(committed=np.full(16, 2), since=np.full(16, 9))
    room = parent_bytes(problem)
    weight_limit = int(low.bytes[:, 0].sum()) + 900
    for limits, most in ((Limits(raise_bytes=700), 700), (Limits(weight_bytes=weight_limit), 900)):
        seen = problem.observation._replace(limits=limits)
        plan = plan_raise(low, seen, problem.policy, room)
        assert plan.transitions
        assert -plan.released_bytes <= most
    assert plan_raise(low, problem.observation, problem.policy, 0) == Plan()


def test_what_hurts_most_per_byte_comes_back_first() -> None:
    problem = parent_problem((8,), (2, 4))
    s_bar = np.stack([np.arange(1.0, 17.0), np.zeros(16)], axis=1)
    policy = problem.policy.replaced(s_bar=s_bar, m_cal=np.ones(16))
    low = problem.table._replace(committed=np.full(16, 2), bytes=np.tile([100, 200], (16, 1)))
    plan = plan_raise(low, problem.observation, policy, 350)
    assert [t.row for t in plan.transitions] == [13, 14, 15]


@settings(max_examples=30)
@given(problems)
def test_lowering_then_raising_in_the_same_step_gains_nothing(problem: Problem) -> None:
    """A row that has just been lowered waits out its dwell, however much room there is."""
    seen = problem.under_pressure(max(1, (problem.held_bytes() - problem.floor_bytes()) // 2))
    _, plan = plan_step(problem.table, seen, problem.policy, Queue())
    waiting = problem.observation._replace(limits=Limits(dwell_steps=4))
    back = plan_raise(carried_out(problem.table, plan), waiting, problem.policy, parent_bytes(problem))
    assert not {t.row for t in back.transitions} & {t.row for t in plan.transitions}


OFFLOAD, RELOAD, BLOCK_BYTES = 8, 16, 512


def step(problem: Problem, free: int, queue: Queue) -> tuple[Queue, Plan]:
    """One boundary under the runtime's hysteresis: lower at or below OFFLOAD, raise only what stays above RELOAD."""
    seen = problem.observation._replace(
        kv=KVState(free, BLOCK_BYTES), threshold_blocks=OFFLOAD, limits=Limits(dwell_steps=4)
    )
    if free <= OFFLOAD:
        return plan_step(problem.table, seen, problem.policy, queue)
    return queue, plan_raise(problem.table, seen, problem.policy, (free - RELOAD - 1) * BLOCK_BYTES)


def test_case_90_kv_use_that_swings_around_the_threshold_moves_a_block_at_most_twice() -> None:
    """KV use goes up and down by two blocks for 100 steps; what weights release is there from then on."""
    problem = parent_problem((8, 8))
    capacity = problem.held_bytes() + 40 * BLOCK_BYTES
    queue, moves = Queue(), np.zeros(32, dtype=int)
    for at in range(100):
        used = 40 - OFFLOAD + (1 if at % 2 else -1)
        free = (capacity - problem.held_bytes()) // BLOCK_BYTES - used
        queue, plan = step(problem, free, queue)
        problem = problem._replace(table=carried_out(problem.table, plan))
        moves[[t.row for t in plan.transitions]] += 1
    assert moves.sum() > 0
    assert moves.max() <= 2


def test_case_90_a_signal_that_never_answers_moves_no_page_to_and_fro() -> None:
    """F itself alternates around the threshold whatever is released: pages only leave, each at most once.

    A linear-block may go down width by width, as every step under pressure asks for new bytes (Eq. 7); at most two
    such steps for each would cost 1.3 to 2 times the predicted damage at the same bytes, widths 2 to 6.
    """
    problem = parent_problem((8, 8))
    queue, pages, released = Queue(), np.zeros((32, 6), dtype=int), 0
    for at in range(100):
        queue, plan = step(problem, OFFLOAD + (1 if at % 2 else -1), queue)
        for t in plan.transitions:
            assert t.lowers
            pages[t.row, t.to_bits : t.from_bits] += 1
        released += plan.released_bytes
        problem = problem._replace(table=carried_out(problem.table, plan))
    assert pages.max() == 1
    assert released <= 50 * (2 * BLOCK_BYTES + int(problem.table.bytes[:, -1].max()))


def test_a_trace_of_growth_bursts_and_ends_neither_stalls_nor_thrashes() -> None:
    """KV grows to a peak, short prompts burst, everything ends: pressure is always answered, and all comes back."""
    problem = parent_problem((8, 8), (2, 3, 4, 5, 6))
    peak_blocks = (problem.held_bytes() - problem.floor_bytes()) // BLOCK_BYTES
    capacity = problem.held_bytes() + 2 * RELOAD * BLOCK_BYTES
    ramp = np.linspace(0, peak_blocks, 60).astype(int)
    bursts = peak_blocks // 2 + 6 * (np.arange(60) % 10 < 3)
    queue, moved_bytes, least_free = Queue(), 0, capacity
    for used in [*ramp, *bursts, *np.zeros(60, dtype=int)]:
        free = (capacity - problem.held_bytes()) // BLOCK_BYTES - int(used)
        queue, plan = step(problem, free, queue)
        assert plan.shortfall_bytes == 0
        problem = problem._replace(table=carried_out(problem.table, plan))
        moved_bytes += abs(plan.released_bytes)
        least_free = min(least_free, (capacity - problem.held_bytes()) // BLOCK_BYTES - int(used))
    assert least_free >= OFFLOAD + 1, "after every boundary free blocks are above the threshold"
    assert problem.held_bytes() == parent_bytes(problem), "what was lowered is back at the end"
    assert moved_bytes <= 4 * (parent_bytes(problem) - problem.floor_bytes()), "bursts move what they need, not more"


def test_multipliers_and_buckets_count_for_raising_too() -> None:
    problem = parent_problem((4,), (2, 4))
    policy = problem.policy.replaced(
        s_bar=np.tile([2.0, 1.0], (8, 1)),
        m_cal=np.ones(8),
        bucket_edges=[0.5],
        multipliers=[1.0, 3.0],
        floors=[[2, 2]],
        depth_caps=[[1, 1]],
    )
    low = problem.table._replace(committed=np.full(8, 2), bytes=np.tile([100, 200], (8, 1)))
    seen = problem.observation._replace(mass=np.array([[0.1, 0.4, 0.4, 0.1]]))
    assert routing_of(seen, policy).bucket.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert [t.row for t in plan_raise(low, seen, policy, 400).transitions] == [2, 3, 4, 5]
    assert initial_bits(low, policy, 1200, seen).tolist() == [2, 2, 4, 4, 4, 4, 2, 2]
