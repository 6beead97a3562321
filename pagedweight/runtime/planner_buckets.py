"""How hot each expert is within its layer: its routing mass, its bucket, and the damage multiplier mu that follows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation

# Live and calibrated mass weigh alike at so many routed tokens: what a sequence's first 8 to 256 tokens say of its
# later half is used best with calibration weighing as much as 64 to 128 tokens, of top-4 and of top-2 routing.
PRIOR_TOKENS = 256


class Routing(NamedTuple):
    """(R,) each: bucket, multiplier mu, and mass, the routing mass that damage per unit of mass is multiplied with."""

    bucket: np.ndarray
    multiplier: np.ndarray
    mass: np.ndarray


def routing_of(observation: Observation, policy: Policy) -> Routing:
    """Every row's routing.

    A layer without live routing is sorted by calibration's routing mass, which is its mass, and its multiplier is 1.
    ValueError when the observed mass does not cover the policy's experts.
    """
    known = policy.experts
    mass, live = _mass_of_experts(observation, policy)
    bucket = expert_buckets(mass, known.exists, policy.bucket_edges)[known.expert_layer, known.expert_number]
    expert_live = live[known.expert_layer]
    multiplier = np.where(expert_live, policy.multipliers[bucket], 1.0)
    trust = policy.mass_trust * _share_of_live(observation, live)
    blended = policy.m_cal
    if trust.any():
        of_layer = (trust * known.layer_mass)[known.expert_layer]
        live_part = of_layer * mass[known.expert_layer, known.expert_number]
        kept = 1.0 - trust[known.expert_layer]
        blended = kept.take(known.of_row) * policy.m_cal
        blended += live_part.take(known.of_row)
    return Routing(bucket.take(known.of_row), multiplier.take(known.of_row), blended)


def _mass_of_experts(observation: Observation, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """(L, E) routing mass, live or calibration's, and bool (L,), which of the two."""
    known, shape = policy.experts, policy.experts.exists.shape
    live, mass = np.zeros(shape[0], dtype=bool), np.zeros(shape)
    if observation.mass is not None:
        mass = observation.mass[: shape[0], : shape[1]]
        if mass.shape != shape:
            raise ValueError(
                f"observed routing mass has shape {observation.mass.shape}; the policy knows {shape[0]} layers of "
                f"up to {shape[1]} experts"
            )
        live = mass.sum(axis=1) > 0
    if not live.all():
        calibrated = np.zeros(shape)
        calibrated[known.expert_layer, known.expert_number] = known.mass
        mass = np.where(live[:, None], mass, calibrated)
    return mass, live


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
    if not edges.size:
        return bucket
    coldest_first = np.sort(np.where(exists, mass, np.inf), axis=1)
    shares = np.arange(mass.shape[1] + 1) / np.maximum(exists.sum(axis=1, keepdims=True), 1)
    for edge in edges:
        # At least so many colder experts reach the edge; whoever is hotter than the last of them has as many.
        fewest = np.count_nonzero(shares < edge, axis=1)[:, None]
        bucket += mass > np.take_along_axis(coldest_first, fewest - 1, axis=1)
    return bucket
