"""What competes with the planner in bench/policies.py: the plain greedy, and column energies in heads' place."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies_energies import adjusted
from bench.policies_plans import held_bytes, plain_greedy
from pagedweight.runtime.planner import initial_bits
from pagedweight.runtime.planner_scores import parent_damage
from tests.runtime.planner_support import Problem, parent_problem

WIDTHS = (2, 3, 4, 5, 6)


def step_by_step(problem: Problem, budget_bytes: int) -> np.ndarray:
    """The cheapest next single-width step of any row, again and again, until the bytes fit."""
    damage, held = parent_damage(problem.table, problem.observation, problem.policy), problem.table.bytes.T
    index = np.full(held.shape[1], len(WIDTHS) - 1)

    def step(row: int, depth: int) -> tuple[float, int, int]:
        w = len(WIDTHS) - 1 - depth
        return (damage[w - 1, row] - damage[w, row]) / (held[w, row] - held[w - 1, row]), row, depth

    waiting = [step(row, 0) for row in range(len(index))]
    heapq.heapify(waiting)
    while held[index, np.arange(len(index))].sum() > budget_bytes:
        _, row, depth = heapq.heappop(waiting)
        index[row] -= 1
        if index[row]:
            heapq.heappush(waiting, step(row, depth + 1))
    return np.array(WIDTHS)[index]


@settings(max_examples=30)
@given(st.integers(0, 2**16), st.floats(0, 1.1))
def test_the_plain_greedy_takes_the_cheapest_next_step_each_time(seed: int, share: float) -> None:
    problem = parent_problem((4, 3), WIDTHS, seed)
    budget = problem.floor_bytes() + int(share * (problem.held_bytes() - problem.floor_bytes()))
    bits = plain_greedy(problem.table, problem.observation, problem.policy, budget)
    assert held_bytes(problem.table, bits) <= budget
    assert (bits == step_by_step(problem, budget)).all()


@settings(max_examples=30)
@given(st.integers(0, 2**16), st.floats(0, 1))
def test_energies_that_are_as_usual_change_nothing_and_dear_ones_spare_their_row(seed: int, share: float) -> None:
    problem = parent_problem((4, 3), WIDTHS, seed)
    budget = problem.floor_bytes() + int(share * (problem.held_bytes() - problem.floor_bytes()))
    usual = np.ones((problem.policy.rows, len(WIDTHS)))
    plain = initial_bits(problem.table, problem.policy, budget, problem.observation)
    same = initial_bits(problem.table, adjusted(problem.policy, usual), budget, problem.observation)
    assert (same == plain).all()
    dear = usual.copy()
    dear[3] = 1e3
    spared = initial_bits(problem.table, adjusted(problem.policy, dear), budget, problem.observation)
    assert spared[3] >= plain[3]
