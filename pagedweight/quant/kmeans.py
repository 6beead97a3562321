"""Importance-weighted one-dimensional k-means with nested codes: a seed partition, then two-way splits upward.

Every row is clustered on its own and all rows at once: rows are sorted, a partition is a list of positions in the
sorted row, and prefix sums give the weight and mean of any interval. Nothing is drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pagedweight.bitplane import table_values
from pagedweight.quant.codebooks import SMOOTH_CODEBOOKS, fit_table
from pagedweight.quant.sorted_rows import SortedRows, codes_of, fill_empty, interval_means, prefix_sums, sort_rows

SEED_CANDIDATES = 48  # boundaries the seed search may choose from; all K of them lower trained rows' loss by < 0.5 %
LLOYD_STEPS = 12
POSITION_BITS = 32


class Clusters(NamedTuple):
    """A nested partition at the parent width P.

    codes: (R, K) uint8 in column order, ascending with the value.
    weights: (R, 2^P) fp64, total importance of each code. means: (R, 2^P) fp64, weighted mean of its members; a code
    without members repeats its neighbour's, which is its parent's.
    """

    codes: Tensor
    weights: Tensor
    means: Tensor


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


def seed_bounds(rows: SortedRows, bits: int, parent_width: int) -> Tensor:
    """Boundaries (R, 2^bits + 1) of the seed partition: dynamic programming on candidates, then Lloyd on all values."""
    clusters = 1 << bits
    bounds = _best_of_candidates(rows, _candidates(rows), clusters)
    for _ in range(LLOYD_STEPS):
        means = interval_means(rows, bounds)
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


def _smooth_bounds(rows: SortedRows, bounds: Tensor, codebook: str) -> Tensor:
    """The partition fitted to a codebook without a table: its least-squares values and the nearest-value cells in turn.

    Bounds that suit free means do not suit a cubic: fitted to them it has 7 to 20 times the loss of lut16 at 6 bits,
    and 1.5 to 1.9 times after this (trained rows; the merged codes lose 0, 3 and 5 % at 2, 3 and 4 bits).
    """
    bits = bounds.shape[1].bit_length() - 1
    for _ in range(LLOYD_STEPS):
        weights = rows.weight_sums.gather(1, bounds).diff(dim=1)
        table = fit_table(codebook, weights, interval_means(rows, bounds))
        values = table_values(table, bits).double().cummax(1).values
        middle = torch.searchsorted(rows.values, (values[:, 1:] + values[:, :-1]) / 2)
        bounds = torch.cat([bounds[:, :1], middle, bounds[:, -1:]], dim=1)
    return bounds


def _nested_bounds(rows: SortedRows, codebooks: Mapping[int, str], seed_width: int) -> Tensor:
    parent_width = max(codebooks)
    smooth = max((bits for bits, codebook in codebooks.items() if codebook in SMOOTH_CODEBOOKS), default=None)
    bounds = seed_bounds(rows, seed_width, parent_width)
    for bits in range(seed_width, parent_width + 1):
        if bits > seed_width:
            bounds = split_bounds(rows, bounds, _capacity(rows, bits, parent_width))
        if bits == smooth:
            bounds = _smooth_bounds(rows, bounds, codebooks[bits])
    return bounds


def cluster_rows(values: Tensor, importance: Tensor, codebooks: Mapping[int, str], seed_width: int) -> Clusters:
    """Nested clusters of every row: 2^seed_width by k-means, then each split in two up to the largest width.

    The widest of the widths whose codebook is a formula (cubic, affine) has its clusters fitted to that formula; those
    above are splits of them.
    values: (R, K) fp64, finite, best of magnitude 1. importance: (R, K) fp64, not negative; a row of zeros counts as
    equal importance. codebooks: by width.
    """
    rows = sort_rows(values, importance)
    bounds = _nested_bounds(rows, codebooks, seed_width)
    sorted_codes = codes_of(bounds)
    means = interval_means(rows, bounds)
    # Prefix sums of a row with an outlier lose digits of its small values; those of the residuals do not.
    residuals = prefix_sums(rows.weights * (rows.values - means.gather(1, sorted_codes)))
    weights = rows.weight_sums.gather(1, bounds).diff(dim=1)
    filled = bounds.diff(dim=1) > 0
    means = fill_empty(means + residuals.gather(1, bounds).diff(dim=1) / weights, filled)
    codes = torch.empty_like(sorted_codes, dtype=torch.uint8).scatter_(1, rows.order, sorted_codes.byte())
    return Clusters(codes, torch.where(filled, weights, 0.0), means)
