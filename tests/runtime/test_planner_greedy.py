"""The greedy over hull segments: within a hair of the exact optimum, which a MILP solver finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.runtime.bench_gap import optimum
from pagedweight.runtime.planner import Queue, plan_step
from pagedweight.runtime.planner_greedy import hull_steps, sorted_places
from pagedweight.runtime.planner_scores import score_actions
from tests.runtime.planner_support import parent_problem


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    "experts",
    [
        (2,),  # 4 rows: the last step is most of the plan
        (4, 4),
        (16, 16),
        (60, 60),  # as many experts as Qwen1.5-MoE, two layers
    ],
)
def test_the_gap_to_the_optimum_is_below_a_hundredth(experts: tuple[int, ...], share: float) -> None:
    for seed in range(2):
        problem = parent_problem(experts, (2, 3, 4, 5, 6), seed)
        scores = score_actions(problem.table, problem.observation, problem.policy)
        scores.damage[-1] = 0.0
        target = int(share * (problem.held_bytes() - problem.floor_bytes()))
        _, plan = plan_step(problem.table, problem.under_pressure(target), problem.policy, Queue())
        exact = optimum(scores.released, scores.damage, target)
        assert plan.damage <= 1.01 * exact
        assert plan.damage >= 0.999 * exact, "better than the optimum: the two do not solve the same problem"


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_steps_are_each_rows_lower_hull(seed: int) -> None:
    """Within a row steps get dearer, follow each other, and no width lies below the line of any step."""
    rng = np.random.default_rng(seed)
    widths, rows = rng.integers(2, 7), 5
    bytes_ = np.cumsum(rng.integers(1, 5, (widths, rows)), axis=0)[::-1].astype(float)
    bytes_ -= bytes_[-1]
    damage = np.concatenate([rng.random((widths - 1, rows)), np.zeros((1, rows))])
    steps = hull_steps(bytes_, damage)
    gained, added = np.diff(steps.bytes, prepend=0), np.diff(steps.damage, prepend=0)
    assert (np.diff(added / gained) >= -1e-9).all()
    for row in range(rows):
        own = steps.row == row
        assert steps.to[own][-1] == 0
        origins = [widths - 1, *steps.to[own][:-1].tolist()]
        assert np.allclose(gained[own], bytes_[steps.to[own], row] - bytes_[origins, row])
        assert np.allclose(added[own], damage[steps.to[own], row] - damage[origins, row])
        for origin, slope in zip(origins, (added / gained)[own], strict=True):
            line = damage[origin, row] + slope * (bytes_[:, row] - bytes_[origin, row])
            assert (damage[:, row] >= line - 1e-9).all()


@settings(max_examples=100)
@given(st.integers(0, 5), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_slopes_are_sorted_and_equal_ones_by_row_and_place(places: int, rows: int, seed: int) -> None:
    """Signs, zeros of both signs, and sizes of any magnitude; what is infinite is left out."""
    rng = np.random.default_rng(seed)
    values = np.array([-np.inf, -3e300, -1.0, -1e-310, -0.0, 0.0, 1e-310, 1e-5, 1.0, 1.0 + 1e-5, 3e300, np.inf])
    slope = rng.choice(values, (places, rows))
    row, place = sorted_places(slope)
    expected = sorted((slope[p, r], r, p) for p, r in np.ndindex(places, rows) if slope[p, r] < np.inf)
    assert list(zip(row.tolist(), place.tolist(), strict=True)) == [(r, p) for _, r, p in expected]
