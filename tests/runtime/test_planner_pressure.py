"""KV pressure over time, replayed through the planner alone: bytes arrive late, rows are busy while they move."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits
from pagedweight.runtime.planner import Plan, Queue, plan_raise, plan_step
from tests.runtime.planner_support import Problem, carried_out, parent_problem

OFFLOAD, RELOAD, DWELL, BLOCK_BYTES, DELAY_STEPS = 8, 16, 4, 512, 2
WIDTHS = (2, 3, 4, 5, 6)


class Replayed(NamedTuple):
    """What a trace came to. moves, turns: by row, transitions, and how many of them went back on the one before.

    least_free: fewest KV blocks that were free at any step, after the requests had theirs. held_bytes: at each step.
    """

    lowered_bytes: int
    raised_bytes: int
    moves: np.ndarray
    turns: np.ndarray
    least_free: int
    held_bytes: list[int]


def replay(problem: Problem, used_blocks: np.ndarray, capacity_bytes: int) -> Replayed:
    """One boundary a step. Bytes that weights give up reach the KV cache two steps later; a raised row is busy as long.

    The planner is told of bytes on their way as in_flight_bytes; raises take theirs at once.
    """
    table, queue = problem.table, Queue()
    rows = len(table.committed)
    moves, turns, last = np.zeros(rows, int), np.zeros(rows, int), np.zeros(rows, int)
    arriving, busy_for, lowered, raised = [0] * DELAY_STEPS, np.zeros(rows, int), 0, 0
    free_bytes, least_free, held = capacity_bytes - problem.held_bytes(), capacity_bytes, []
    for used in used_blocks:
        free_bytes += arriving.pop(0)
        arriving.append(0)
        busy_for = np.maximum(busy_for - 1, 0)
        free = free_bytes // BLOCK_BYTES - int(used)
        least_free = min(least_free, free)
        now = problem._replace(table=table._replace(busy=busy_for > 0))
        queue, plan = boundary(now, free, sum(arriving), queue)
        for transition in plan.transitions:
            way = 1 if transition.lowers else -1
            turns[transition.row] += last[transition.row] == -way
            last[transition.row] = way
            moves[transition.row] += 1
            busy_for[transition.row] = DELAY_STEPS
        lowered += max(0, plan.released_bytes)
        raised += max(0, -plan.released_bytes)
        arriving[-1] += max(0, plan.released_bytes)
        free_bytes -= max(0, -plan.released_bytes)
        table = carried_out(table, plan)
        held.append(problem._replace(table=table).held_bytes())
    return Replayed(lowered, raised, moves, turns, least_free, held)


def boundary(problem: Problem, free: int, in_flight_bytes: int, queue: Queue) -> tuple[Queue, Plan]:
    """Lower at or below OFFLOAD free blocks; raise only what leaves more than RELOAD free."""
    seen = problem.observation._replace(
        kv=KVState(free, BLOCK_BYTES),
        threshold_blocks=OFFLOAD,
        in_flight_bytes=in_flight_bytes,
        limits=Limits(dwell_steps=DWELL),
    )
    if free <= OFFLOAD:
        return plan_step(problem.table, seen, problem.policy, queue)
    return queue, plan_raise(problem.table, seen, problem.policy, (free - RELOAD - 1) * BLOCK_BYTES)


def bursts(base: int, height: int, count: int) -> np.ndarray:
    """Short prompts: for three of every ten steps some blocks more."""
    return base + height * (np.arange(10 * count) % 10 < 3)


@pytest.fixture(params=range(3))
def problem(request: pytest.FixtureRequest) -> Problem:
    return parent_problem((8, 8), WIDTHS, seed=request.param)


def room_blocks(problem: Problem) -> int:
    return (problem.held_bytes() - problem.floor_bytes()) // BLOCK_BYTES


def test_growth_bursts_and_an_end_neither_stall_nor_oscillate(problem: Problem, record_property) -> None:
    """KV grows to a peak and shrinks by half, short prompts burst, everything ends; all weights are back then."""
    peak = room_blocks(problem)
    capacity = problem.held_bytes() + 2 * RELOAD * BLOCK_BYTES
    grows, shrinks = np.linspace(0, peak, 90).astype(int), np.linspace(peak, peak // 2, 30).astype(int)
    trace = np.concatenate([grows, np.full(20, peak), shrinks, bursts(peak // 2, 6, 8), np.zeros(40, int)])
    seen = replay(problem, trace, capacity)
    for name, value in (("lowered_bytes", seen.lowered_bytes), ("raised_bytes", seen.raised_bytes)):
        record_property(name, value)
    assert seen.least_free >= 0, "a request waited for memory that weights held"
    assert seen.held_bytes[-1] == problem.held_bytes(), "what was lowered is back at the end"
    assert seen.lowered_bytes == seen.raised_bytes
    # One way down with the growth, one way back; bursts within the thresholds' gap cost nothing after the first.
    assert seen.lowered_bytes <= 1.5 * (problem.held_bytes() - problem.floor_bytes())
    assert seen.turns.max() <= 3
    assert seen.moves.max() <= 3 * len(WIDTHS)


def test_bursts_smaller_than_the_gap_move_nothing_after_the_first(problem: Problem) -> None:
    """The bytes that the first burst took stay released: raising would leave too few blocks for the next one."""
    base = room_blocks(problem) // 2
    capacity = problem.held_bytes() + (OFFLOAD + 2 + base) * BLOCK_BYTES - base * BLOCK_BYTES // 2
    height = RELOAD - OFFLOAD - 2
    settled = replay(problem, bursts(base, height, 4), capacity)
    longer = replay(problem, bursts(base, height, 40), capacity)
    assert settled.lowered_bytes > 0
    assert longer.moves.tolist() == settled.moves.tolist()
    assert longer.lowered_bytes == settled.lowered_bytes
    assert longer.turns.max() == 0


def test_a_late_signal_is_not_answered_twice(problem: Problem) -> None:
    """While released bytes are on their way, the same pressure is read again; no more is planned for it."""
    short = room_blocks(problem) // 3
    capacity = problem.held_bytes() + OFFLOAD * BLOCK_BYTES
    seen = replay(problem, np.full(12, short), capacity)
    needed = (OFFLOAD + 1 - (capacity - problem.held_bytes()) // BLOCK_BYTES + short) * BLOCK_BYTES
    largest_step = int(np.diff(problem.table.bytes, axis=1).max())
    assert needed <= seen.lowered_bytes <= needed + largest_step
    assert len(set(seen.held_bytes)) == 1
