"""Rows in ascending order, and partitions of them: a partition is a list of positions, its sums are differences.

Shapes: R rows of K values, C intervals. Bounds are (R, C + 1) int64 positions from 0 to K, not descending.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WEIGHT_FLOOR = 1e-6  # of the row's largest importance: weights of importance 0 still get a sensible code


class SortedRows(NamedTuple):
    """Rows in ascending order with their prefix sums.

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


def prefix_sums(values: Tensor) -> Tensor:
    """(R, K + 1): the sums of the first i of K values of each row."""
    return torch.nn.functional.pad(values.cumsum(1), (1, 0))


def sort_rows(values: Tensor, importance: Tensor) -> SortedRows:
    """Sorted rows with prefix sums. values: (R, K) fp64; importance: (R, K) fp64, not negative."""
    ordered, order = torch.sort(values, dim=1, stable=True)
    peak = importance.amax(1, keepdim=True)
    weights = torch.where(peak > 0, importance / torch.where(peak > 0, peak, 1.0), 1.0).clamp_min(WEIGHT_FLOOR)
    weights = weights.gather(1, order)
    new = torch.ones_like(order)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return SortedRows(ordered, weights, order, prefix_sums(weights), prefix_sums(weights * ordered), prefix_sums(new))


def interval_means(rows: SortedRows, bounds: Tensor) -> Tensor:
    """Weighted mean of each interval, (R, C); an empty one repeats the one to its left (at the start, to its right)."""
    weights = rows.weight_sums.gather(1, bounds).diff(dim=1)
    means = rows.value_sums.gather(1, bounds).diff(dim=1) / weights
    return fill_empty(means, bounds.diff(dim=1) > 0)


def fill_empty(means: Tensor, filled: Tensor) -> Tensor:
    """Means (R, C) with those not in `filled` replaced by the nearest filled one to the left, else to the right."""
    source = torch.where(filled, torch.arange(means.shape[1], device=means.device), -1).cummax(1).values
    first = filled.int().argmax(1, keepdim=True)
    return means.gather(1, torch.where(source < 0, first, source))


def codes_of(bounds: Tensor) -> Tensor:
    """The interval number (R, K) int64 of every sorted position."""
    steps = torch.zeros(bounds.shape[0], int(bounds[0, -1]) + 1, dtype=torch.int64, device=bounds.device)
    return steps.scatter_add_(1, bounds[:, 1:-1], torch.ones_like(bounds[:, 1:-1])).cumsum(1)[:, :-1]
