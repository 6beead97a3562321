"""How hot each expert is within its layer: its routing mass, its bucket, and the damage multiplier mu that follows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.table_view import TableSnapshot

# Live and calibrated mass weigh alike at so many routed tokens: what a sequence's first 8 to 256 tokens say of its
# later half is used best with calibration weighing as much as 64 to 128 tokens, of top-4 and of top-2 routing.
PRIOR_TOKENS = 256


class Routing(NamedTuple):
    """(R,) each: bucket, multiplier mu, and mass, the routing mass that damage per unit of mass is multiplied with."""

    bucket: np.ndarray
    multiplier: np.ndarray
    mass: np.ndarray


def routing_of(table: TableSnapshot, observation: Observation, policy: Policy) -> Routing:
    """Every row's routing; rows in order of (layer, expert, projection).

    A layer without live routing is sorted by calibration's routing mass, which is its mass, and its multiplier is 1.
    ValueError when the observed mass does not cover the table.
    """
    opens = np.append(True, (table.layer[1:] != table.layer[:-1]) | (table.expert[1:] != table.expert[:-1]))
    starts = np.flatnonzero(opens)
    layer, expert = table.layer[starts], table.expert[starts]
    shape = (int(layer.max()) + 1, int(expert.max()) + 1)
    exists = np.zeros(shape, dtype=bool)
    exists[layer, expert] = True
    live, mass = np.zeros(shape[0], dtype=bool), np.zeros(shape)
    if observation.mass is not None:
        mass = observation.mass[: shape[0], : shape[1]]
        if mass.shape != shape:
            raise ValueError(
                f"observed routing mass has shape {observation.mass.shape}; the page table has {shape[0]} layers of "
                f"up to {shape[1]} experts"
            )
        live = mass.sum(axis=1) > 0
    if not live.all():
        calibrated = np.zeros(shape)
        calibrated[layer, expert] = np.maximum.reduceat(policy.m_cal, starts)
        mass = np.where(live[:, None], mass, calibrated)
    bucket = expert_buckets(mass, exists, policy.bucket_edges)
    multiplier = np.where(live[:, None], policy.multipliers[bucket], 1.0)
    rows = np.diff(starts, append=len(opens))
    trust = policy.mass_trust * _share_of_live(observation, live)
    if trust.any():
        of_row = np.repeat(mass[layer, expert], rows)
        of_layer = np.bincount(layer, np.maximum.reduceat(policy.m_cal, starts))
        trust, of_layer = trust[table.layer], of_layer[table.layer]
        blended = policy.m_cal + trust * (of_layer * of_row - policy.m_cal)
    else:
        blended = policy.m_cal
    return Routing(np.repeat(bucket[layer, expert], rows), np.repeat(multiplier[layer, expert], rows), blended)


def _share_of_live(observation: Observation, live: np.ndarray) -> np.ndarray:
    """(L,), how much live mass tells beside calibration's, from the tokens behind it; 0 for a layer without."""
    if observation.routed is None:
        return live.astype(float)
    routed = observation.routed[: len(live)]
    return live * (routed / (routed + PRIOR_TOKENS))


def expert_buckets(mass: np.ndarray, exists: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """int64 (L, E) bucket of each expert from (L, E) routing mass; exists is False where a layer has fewer experts.

    The share of a layer's experts that are strictly colder decides, so equally cold experts share a bucket.
    """
    bucket = np.zeros(mass.shape, dtype=np.int64)
    coldest_first = np.sort(np.where(exists, mass, np.inf), axis=1)
    shares = np.arange(mass.shape[1] + 1) / np.maximum(exists.sum(axis=1, keepdims=True), 1)
    for edge in edges:
        # At least so many colder experts reach the edge; whoever is hotter than the last of them has as many.
        fewest = np.count_nonzero(shares < edge, axis=1)[:, None]
        bucket += mass > np.take_along_axis(coldest_first, fewest - 1, axis=1)
    return bucket
