"""Weighted k-means with nested codes: optimal where it claims to be, and sound on rows that break quantizers."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.quant.kmeans import cluster_rows, seed_bounds, split_bounds
from pagedweight.quant.sorted_rows import codes_of, interval_means, sort_rows


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def lut16(parent_width: int) -> dict[int, str]:
    return {parent_width: "lut16"}


NO_LIMIT = torch.tensor([[1 << 20]])


@st.composite
def weighted_rows(draw: st.DrawFn, columns: st.SearchStrategy[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of values, some repeated, with positive importance."""
    k = draw(columns)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(3, k, generator=generator, dtype=torch.float64)
    values[1] = (values[1] * 2).round()  # repeats
    return values, torch.rand(3, k, generator=generator, dtype=torch.float64) + 0.01


def squared_error(values: torch.Tensor, weights: torch.Tensor, cuts: tuple[int, ...]) -> float:
    """Weighted squared error of one sorted row cut at these positions, by definition."""
    error, edges = 0.0, (0, *cuts, len(values))
    for low, high in pairwise(edges):
        x, w = values[low:high], weights[low:high]
        if len(x):
            error += float((w * (x - (w * x).sum() / w.sum()) ** 2).sum())
    return error


@given(weighted_rows(st.integers(5, 9)))
def test_the_seed_partition_is_optimal_on_short_rows(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = sort_rows(*case)
    bounds = seed_bounds(rows, 2, 2)
    for row in range(3):
        x, w = rows.values[row], rows.weights[row]
        best = min(squared_error(x, w, cuts) for cuts in combinations(range(len(x) + 1), 3))
        assert squared_error(x, w, tuple(bounds[row, 1:-1].tolist())) <= best + 1e-9


def test_the_seed_partition_of_a_long_row_settles_at_the_midpoints_of_its_means() -> None:
    rows = sort_rows(torch.randn(20, 2000, dtype=torch.float64), torch.rand(20, 2000, dtype=torch.float64) + 0.1)
    bounds = seed_bounds(rows, 3, 6)
    means = interval_means(rows, bounds)
    settled = torch.searchsorted(rows.values, (means[:, 1:] + means[:, :-1]) / 2)
    assert (settled - bounds[:, 1:-1]).abs().double().mean() < 2  # the candidates lie 40 positions apart


@given(weighted_rows(st.integers(2, 12)))
def test_a_split_is_the_best_cut_of_its_interval(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = sort_rows(*case)
    columns = rows.values.shape[1]
    half = columns // 2
    middle = torch.searchsorted(rows.values, rows.values[:, half : half + 1].contiguous())  # never within equal values
    halves = torch.nn.functional.pad(torch.nn.functional.pad(middle, (1, 0)), (0, 1), value=columns)
    bounds = split_bounds(rows, halves, NO_LIMIT)
    for row in range(3):
        for part, (low, high) in enumerate(((0, int(middle[row])), (int(middle[row]), columns))):
            x, w = rows.values[row, low:high], rows.weights[row, low:high]
            best = min((squared_error(x, w, (cut,)) for cut in range(len(x) + 1)), default=0.0)
            cut = int(bounds[row, 2 * part + 1]) - low
            assert squared_error(x, w, (cut,)) <= best + 1e-6 * float(rows.values.square().sum())


@given(weighted_rows(st.integers(1, 80)), st.integers(1, 3), st.integers(3, 6))
def test_codes_ascend_with_values_and_means_are_their_members(
    case: tuple[torch.Tensor, torch.Tensor], seed_width: int, parent_width: int
) -> None:
    values, importance = case
    clusters = cluster_rows(values, importance, lut16(parent_width), seed_width)
    assert bool((clusters.means.diff(dim=1) >= 0).all())
    for row in range(3):
        order = values[row].argsort()
        assert bool((clusters.codes[row][order].int().diff() >= 0).all())
        for code in range(1 << parent_width):
            members = clusters.codes[row] == code
            assert bool(members.any()) == bool(clusters.weights[row, code] > 0)
            if members.any():
                w, x = importance[row][members], values[row][members]
                assert clusters.means[row, code] == pytest.approx(float((w * x).sum() / w.sum()), abs=1e-9)


def test_equal_values_share_a_code_at_every_width() -> None:
    values = torch.tensor([[1.0, 3.0, 1.0, 2.0, 3.0, 1.0] * 5]).double()
    codes = cluster_rows(values, torch.ones_like(values), lut16(6), 3).codes[0]
    for value in (1.0, 2.0, 3.0):
        assert codes[values[0] == value].unique().numel() == 1


@given(st.integers(1, 64), st.integers(0, 2**31))
def test_few_distinct_values_get_a_code_each_as_soon_as_there_are_enough(distinct: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    palette = torch.randn(distinct, generator=generator, dtype=torch.float64).unique()
    values = palette[torch.randint(0, len(palette), (1, 90), generator=generator)]
    codes = cluster_rows(values, torch.ones_like(values), lut16(6), 3).codes[0].int()
    distinct = values.unique().numel()
    for bits in range(2, 7):
        pairs = torch.stack([codes >> (6 - bits), values[0].unique(return_inverse=True)[1].int()]).unique(dim=1)
        if distinct <= 1 << bits:
            assert pairs[0].unique().numel() == pairs.shape[1]  # no code stands for two values


def test_an_outlier_does_not_cost_the_small_values_their_digits() -> None:
    values = torch.cat([torch.tensor([-65504.0]).double(), torch.arange(1, 40).double() / 3000]).unsqueeze(0)
    clusters = cluster_rows(values, torch.ones_like(values), lut16(6), 3)
    seen = clusters.means.gather(1, clusters.codes.long())
    torch.testing.assert_close(seen, values, rtol=1e-11, atol=0)


def test_importance_decides_which_values_are_kept() -> None:
    values = torch.linspace(-1, 1, 101).double().expand(2, -1)
    importance = torch.ones(2, 101, dtype=torch.float64)
    importance[0, 60:70], importance[1, 20:30] = 1000.0, 1000.0
    clusters = cluster_rows(values, importance, lut16(3), 3)
    error = (values - clusters.means.gather(1, clusters.codes.long())).abs()
    assert error[0, 60:70].mean() < error[1, 60:70].mean() / 2
    assert error[1, 20:30].mean() < error[0, 20:30].mean() / 2


def test_rows_do_not_know_of_one_another() -> None:
    values = torch.randn(6, 70, dtype=torch.float64)
    importance = torch.rand(6, 70, dtype=torch.float64)
    together = cluster_rows(values, importance, lut16(6), 3)
    for row in range(6):
        alone = cluster_rows(values[row : row + 1], importance[row : row + 1], lut16(6), 3)
        assert torch.equal(alone.codes[0], together.codes[row])
        assert torch.equal(alone.means[0], together.means[row])


def test_codes_of_counts_the_bounds_passed() -> None:
    assert codes_of(torch.tensor([[0, 2, 2, 5], [0, 0, 4, 5]])).tolist() == [[0, 0, 2, 2, 2], [1, 1, 1, 1, 2]]
