"""Routing buckets: how hot each expert is within its layer, and the damage multiplier mu that follows."""

from __future__ import annotations

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.table_view import TableSnapshot


def routing_buckets(table: TableSnapshot, observation: Observation, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """(R,) bucket and (R,) multiplier mu of every row; rows in order of (layer, expert, projection).

    A layer without live routing is sorted by calibration's routing mass, and its multiplier is 1: s already holds
    calibration's hotness. ValueError when the observed mass does not cover the table.
    """
    starts = np.flatnonzero(np.append(True, (np.diff(table.layer) != 0) | (np.diff(table.expert) != 0)))
    layer, expert = table.layer[starts], table.expert[starts]
    shape = (int(layer.max()) + 1, int(expert.max()) + 1)
    exists = np.zeros(shape, dtype=bool)
    exists[layer, expert] = True
    mass = np.zeros(shape)
    mass[layer, expert] = np.maximum.reduceat(policy.m_cal, starts)
    live = np.zeros(shape[0], dtype=bool)
    if observation.mass is not None:
        seen = observation.mass[: shape[0], : shape[1]]
        if seen.shape != shape:
            raise ValueError(
                f"observed routing mass has shape {observation.mass.shape}; the page table has {shape[0]} layers of "
                f"up to {shape[1]} experts"
            )
        live = seen.sum(axis=1) > 0
        mass = np.where(live[:, None], seen, mass)
    bucket = expert_buckets(mass, exists, policy.bucket_edges)[table.layer, table.expert]
    return bucket, np.where(live[table.layer], policy.multipliers[bucket], 1.0)


def expert_buckets(mass: np.ndarray, exists: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """int64 (L, E) bucket of each expert from (L, E) routing mass; exists is False where a layer has fewer experts.

    The share of a layer's experts that are strictly colder decides, so equally cold experts share a bucket.
    """
    if not edges.size:
        return np.zeros(mass.shape, dtype=np.int64)
    mass = np.where(exists, mass, np.inf)
    order = np.argsort(mass, axis=1)
    ranked = np.take_along_axis(mass, order, axis=1)
    first_equal = np.tile(np.arange(mass.shape[1]), (mass.shape[0], 1))
    first_equal[:, 1:][ranked[:, 1:] == ranked[:, :-1]] = 0
    colder = np.empty_like(first_equal)
    np.put_along_axis(colder, order, np.maximum.accumulate(first_equal, axis=1), axis=1)
    share = colder / np.maximum(exists.sum(axis=1, keepdims=True), 1)
    return np.searchsorted(edges, share, side="right")
