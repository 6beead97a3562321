"""Importance-weighted one-dimensional k-means with nested codes: a seed partition, then two-way splits upward.

Every row is clustered on its own and all rows at once: rows are sorted, a partition is a list of positions in the
sorted row, and prefix sums give the weight and mean of any interval. Nothing is drawn at random.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SEED_CANDIDATES = 48  # boundaries the seed search may choose from; all K of them lower trained rows' loss by < 0.5 %
LLOYD_STEPS = 12
WEIGHT_FLOOR = 1e-6  # of the row's largest importance: weights of importance 0 still get a sensible code
POSITION_BITS = 32


class SortedRows(NamedTuple):
    """Rows in ascending order with their prefix sums. R rows of K values.

    values: (R, K) fp64. weights: (R, K) fp64, positive. order: (R, K) int64, the column of each sorted value.
    weight_sums, value_sums: (R, K + 1) fp64, sums of w and w x over the first i values.
    distinct: (R, K + 1) int64, distinct values among the first i.
    """

    values: Tensor
    weights: Tensor
    order: Tensor
    weight_sums: Tensor
    value_sums: Tensor
    distinct: Tensor


class Clusters(NamedTuple):
    """A nested partition at the parent width P.

    codes: (R, K) uint8 in column order, ascending with the value.
    weights: (R, 2^P) fp64, total importance of each code. means: (R, 2^P) fp64, weighted mean of its members; a code
    without members repeats its neighbour's, which is its parent's.
    """

    codes: Tensor
    weights: Tensor
    means: Tensor


def _prefix_sums(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(1), (1, 0))


def sort_rows(values: Tensor, importance: Tensor) -> SortedRows:
    """Sorted rows with prefix sums. values: (R, K) fp64; importance: (R, K) fp64, not negative."""
    ordered, order = torch.sort(values, dim=1, stable=True)
    peak = importance.amax(1, keepdim=True)
    weights = torch.where(peak > 0, importance / torch.where(peak > 0, peak, 1.0), 1.0).clamp_min(WEIGHT_FLOOR)
    weights = weights.gather(1, order)
    new = torch.ones_like(order)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return SortedRows(
        ordered, weights, order, _prefix_sums(weights), _prefix_sums(weights * ordered), _prefix_sums(new)
    )


def _capacity(rows: SortedRows, bits: int, parent_width: int) -> Tensor:
    """How many distinct values a cluster may hold at `bits`, (R, 1): few enough that splits can still separate them.

    A row with at most 2^P distinct values is then exact at every width that has a code for each of them.
    """
    distinct = rows.distinct[:, -1:]
    enough = torch.ceil(torch.log2(distinct.double())).long()
    spare = (enough - bits).clamp(0, parent_width)
    return torch.where(enough <= parent_width, 1 << spare, rows.values.shape[1])


def _candidates(rows: SortedRows) -> Tensor:
    """Positions that seed boundaries are searched among, (R, M + 1), ascending from 0 to K.

    Spread evenly in the integral of density^(1/3), which is how the boundaries of an optimal quantizer of many levels
    lie; a gap between neighbours of density f is 1 / f, so each gap adds gap^(2/3) to that integral.
    """
    count, columns = rows.values.shape
    if columns <= SEED_CANDIDATES:
        return torch.arange(columns + 1, device=rows.values.device).expand(count, -1)
    weights = (rows.weights[:, 1:] + rows.weights[:, :-1]) / 2
    share = (weights.pow(1 / 3) * rows.values.diff(dim=1).pow(2 / 3)).cumsum(1)
    steps = torch.arange(1, SEED_CANDIDATES, device=share.device) / SEED_CANDIDATES
    inner = torch.searchsorted(share, share[:, -1:] * steps) + 1
    return torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=columns)


def _interval_means(rows: SortedRows, bounds: Tensor) -> Tensor:
    """Weighted mean of each interval, (R, C); an empty one repeats the one to its left (at the start, to its right)."""
    weights = rows.weight_sums.gather(1, bounds).diff(dim=1)
    means = rows.value_sums.gather(1, bounds).diff(dim=1) / weights
    return fill_empty(means, bounds.diff(dim=1) > 0)


def fill_empty(means: Tensor, filled: Tensor) -> Tensor:
    """Means (R, C) with those not in `filled` replaced by the nearest filled one to the left, else to the right."""
    source = torch.where(filled, torch.arange(means.shape[1], device=means.device), -1).cummax(1).values
    first = filled.int().argmax(1, keepdim=True)
    return means.gather(1, torch.where(source < 0, first, source))


def seed_bounds(rows: SortedRows, bits: int, parent_width: int) -> Tensor:
    """Boundaries (R, 2^bits + 1) of the seed partition: dynamic programming on candidates, then Lloyd on all values."""
    clusters = 1 << bits
    bounds = _best_of_candidates(rows, _candidates(rows), clusters)
    for _ in range(LLOYD_STEPS):
        means = _interval_means(rows, bounds)
        middle = torch.searchsorted(rows.values, (means[:, 1:] + means[:, :-1]) / 2)
        if torch.equal(middle, bounds[:, 1:-1]):
            break
        bounds = torch.cat([bounds[:, :1], middle, bounds[:, -1:]], dim=1)
    return _within_capacity(rows, bounds, _capacity(rows, bits, parent_width))


def _best_of_candidates(rows: SortedRows, candidates: Tensor, clusters: int) -> Tensor:
    """The partition into `clusters` intervals (some may be empty) with the least squared error, (R, clusters + 1)."""
    weights = rows.weight_sums.gather(1, candidates)
    values = rows.value_sums.gather(1, candidates)
    values = values - weights * (values[:, -1:] / weights[:, -1:])  # about the row's mean: squares keep their digits
    weight = weights.unsqueeze(1) - weights.unsqueeze(2)
    value = values.unsqueeze(1) - values.unsqueeze(2)
    explained = torch.where(weight > 0, value.square() / weight, 0.0)  # [r, i, j]: gain of the interval i..j
    explained.masked_fill_(torch.ones_like(explained[0], dtype=torch.bool).tril(-1), float("-inf"))
    best, choices = explained[:, 0], []
    for _ in range(clusters - 1):
        best, choice = (best.unsqueeze(2) + explained).max(1)
        choices.append(choice)
    last = torch.full_like(candidates[:, :1], candidates.shape[1] - 1)
    picked = [last]
    for choice in reversed(choices):
        picked.insert(0, choice.gather(1, picked[0]))
    return candidates.gather(1, torch.cat([torch.zeros_like(last), *picked], dim=1))


def _within_capacity(rows: SortedRows, bounds: Tensor, capacity: Tensor) -> Tensor:
    """The bounds moved as little as needed so that no interval holds more than `capacity` distinct values.

    A row with fewer distinct values than intervals has them spread out, so that merged neighbours hold one each too.
    """
    clusters = bounds.shape[1] - 1
    ranks = rows.distinct.gather(1, bounds)
    total = ranks[:, -1:]
    moved = [ranks[:, :1]]
    for cluster in range(1, clusters):
        low = torch.maximum(moved[-1], total - (clusters - cluster) * capacity)
        moved.append(torch.minimum(torch.maximum(ranks[:, cluster : cluster + 1], low), moved[-1] + capacity))
    stride = clusters >> torch.ceil(torch.log2(total.clamp(max=clusters).double())).long()
    spread = ((torch.arange(clusters + 1, device=bounds.device) + stride - 1) // stride).minimum(total)
    wanted = torch.where(total <= clusters, spread, torch.cat([*moved, total], dim=1))
    positions = torch.searchsorted(rows.distinct, wanted, right=True) - 1
    return torch.where(total > clusters * capacity, bounds, positions)


def split_bounds(rows: SortedRows, bounds: Tensor, capacity: Tensor) -> Tensor:
    """Boundaries (R, 2 C + 1): each interval cut in two where that lowers the squared error most (exact search).

    An interval of one distinct value stays whole on the left and leaves its right half empty.
    """
    codes = codes_of(bounds)
    low, high = bounds[:, :-1].gather(1, codes), bounds[:, 1:].gather(1, codes)
    left_weight = rows.weight_sums[:, :-1] - rows.weight_sums.gather(1, low)
    right_weight = rows.weight_sums.gather(1, high) - rows.weight_sums[:, :-1]
    left = (rows.value_sums[:, :-1] - rows.value_sums.gather(1, low)) / left_weight
    right = (rows.value_sums.gather(1, high) - rows.value_sums[:, :-1]) / right_weight
    gain = (left - right).square() * (left_weight * right_weight / (left_weight + right_weight))
    before = rows.distinct[:, :-1]
    allowed = (rows.distinct[:, 1:] > before) & (before > rows.distinct.gather(1, low))
    allowed &= before - rows.distinct.gather(1, low) <= capacity
    allowed &= rows.distinct.gather(1, high) - before <= capacity
    # The bits of a positive float order as the float does: gain and position make one integer, and its maximum
    # over an interval is the best cut. 0 means that no cut is allowed.
    rank = (gain.float().view(torch.int32).long() + 1) << POSITION_BITS
    position = torch.arange(codes.shape[1], device=codes.device)
    key = torch.where(allowed, rank | position, 0)
    best = torch.zeros_like(bounds[:, :-1]).scatter_reduce_(1, codes, key, "amax")
    cut = torch.where(best > 0, best & ((1 << POSITION_BITS) - 1), bounds[:, 1:])
    return torch.cat([bounds[:, :1], torch.stack([cut, bounds[:, 1:]], dim=2).flatten(1)], dim=1)


def codes_of(bounds: Tensor) -> Tensor:
    """The interval number (R, K) int64 of every sorted position."""
    steps = torch.zeros(bounds.shape[0], int(bounds[0, -1]) + 1, dtype=torch.int64, device=bounds.device)
    return steps.scatter_add_(1, bounds[:, 1:-1], torch.ones_like(bounds[:, 1:-1])).cumsum(1)[:, :-1]


def cluster_rows(values: Tensor, importance: Tensor, seed_width: int, parent_width: int) -> Clusters:
    """Nested clusters of every row: 2^seed_width by k-means, then each split in two up to 2^parent_width.

    values: (R, K) fp64, finite. importance: (R, K) fp64, not negative; a row of zeros counts as equal importance.
    """
    rows = sort_rows(values, importance)
    bounds = seed_bounds(rows, seed_width, parent_width)
    for bits in range(seed_width + 1, parent_width + 1):
        bounds = split_bounds(rows, bounds, _capacity(rows, bits, parent_width))
    sorted_codes = codes_of(bounds)
    means = _interval_means(rows, bounds)
    # Prefix sums of a row with an outlier lose digits of its small values; those of the residuals do not.
    residuals = _prefix_sums(rows.weights * (rows.values - means.gather(1, sorted_codes)))
    weights = rows.weight_sums.gather(1, bounds).diff(dim=1)
    filled = bounds.diff(dim=1) > 0
    means = fill_empty(means + residuals.gather(1, bounds).diff(dim=1) / weights, filled)
    codes = torch.empty_like(sorted_codes, dtype=torch.uint8).scatter_(1, rows.order, sorted_codes.byte())
    return Clusters(codes, torch.where(filled, weights, 0.0), means)
