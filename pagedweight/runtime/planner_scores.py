"""ScoreActions of Algorithm 1: buckets, bitwidth floors, and every legal transition's bytes and predicted damage.

Arrays over transitions are (W, R): entry [w, r] is row r's move from its committed width to widths[w].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.damage import global_damage, log_residual, predicted_damage, residual_factor
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.table_view import TableSnapshot


class Scores(NamedTuple):
    """What the greedy needs to know about each row at one step.

    committed: (R,) index of the committed width. movable: bool (R,). bucket: (R,).
    released: int64 (W, R), bytes freed by moving to each width (negative: needed).
    damage: (W, R), d-hat of moving to each lower width; 0 at the committed one, infinite above it.
    """

    committed: np.ndarray
    movable: np.ndarray
    bucket: np.ndarray
    multiplier: np.ndarray
    released: np.ndarray
    damage: np.ndarray


def score_actions(table: TableSnapshot, observation: Observation, policy: Policy) -> Scores:
    """Buckets, bytes and predicted damage (Eq. 8) of every lowering, floors and caps not yet applied."""
    committed = np.searchsorted(table.widths, table.committed)
    bucket, multiplier = routing_buckets(table, observation, policy)
    rows, width_index = np.arange(len(committed)), np.arange(len(table.widths))[:, None]
    memory = np.ascontiguousarray(table.bytes.T)
    damage = transition_damage(table, observation, policy, multiplier, committed, width_index)
    damage[width_index > committed] = np.inf
    damage[committed, rows] = 0.0
    return Scores(committed, ~table.busy, bucket, multiplier, memory[committed, rows] - memory, damage)


def canonical(
    table: TableSnapshot, observation: Observation, policy: Policy
) -> tuple[TableSnapshot, Observation, Policy, np.ndarray | None]:
    """The same step with rows ordered by (layer, expert, projection), which breaks every tie, and the rows' numbers.

    The numbers are None where the rows already are in that order, as every Layout's are.
    """
    check_policy(table, policy)
    experts = int(table.expert.max()) + 1
    key = (table.layer * experts + table.expert) * 2 + table.projection
    if (key[1:] > key[:-1]).all():
        return table, observation, policy, None
    order = np.argsort(key, kind="stable")
    table = TableSnapshot(table.widths, *(column[order] for column in table[1:]))
    pins = observation.limits.lowest_bits
    observation = observation._replace(
        features=None if observation.features is None else observation.features[order],
        confidence=None if observation.confidence is None else observation.confidence[order],
        limits=observation.limits._replace(lowest_bits=None if pins is None else pins[order]),
    )
    rows = {name: getattr(policy, name)[order] for name in ("blocks", "s_bar", "m_cal")}
    return table, observation, policy.replaced(**rows), order


def check_policy(table: TableSnapshot, policy: Policy) -> None:
    """ValueError unless policy and table describe the same rows and widths."""
    if policy.widths != tuple(table.widths) or policy.rows != len(table.committed):
        raise ValueError(
            f"the policy has {policy.rows} rows of widths {policy.widths}, the page table {len(table.committed)} rows "
            f"of widths {tuple(table.widths)}; calibrate for this checkpoint"
        )


def routing_buckets(table: TableSnapshot, observation: Observation, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """(R,) bucket and (R,) multiplier mu of every row.

    A layer without live routing is sorted by calibration's routing mass, and its multiplier is 1: s already holds
    calibration's hotness.
    """
    rows = len(table.layer)
    if policy.multipliers.size == 1 and observation.mass is None:
        return np.zeros(rows, dtype=np.int64), np.ones(rows)
    layers, experts = int(table.layer.max()) + 1, int(table.expert.max()) + 1
    calibrated = np.full((layers, experts), -np.inf)
    np.maximum.at(calibrated, (table.layer, table.expert), policy.m_cal)
    mass, live = calibrated, np.zeros(layers, dtype=bool)
    if observation.mass is not None:
        if observation.mass.shape[0] < layers or observation.mass.shape[1] < experts:
            raise ValueError(
                f"observed routing mass has shape {observation.mass.shape}; the page table has {layers} layers of up "
                f"to {experts} experts"
            )
        observed = observation.mass[:layers, :experts]
        live = observed.sum(axis=1) > 0
        mass = np.where(live[:, None] & np.isfinite(calibrated), observed, calibrated)
    bucket = expert_buckets(mass, policy.bucket_edges)[table.layer, table.expert]
    return bucket, np.where(live[table.layer], policy.multipliers[bucket], 1.0)


def expert_buckets(mass: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(L, E) bucket of each expert from (L, E) routing mass, -inf where a layer has no such expert.

    The share of a layer's experts that are strictly colder decides, so equally cold experts share a bucket.
    """
    padded = np.where(np.isneginf(mass), np.inf, mass)
    order = np.argsort(padded, axis=1, kind="stable")
    ranked = np.take_along_axis(padded, order, axis=1)
    place = np.broadcast_to(np.arange(mass.shape[1]), mass.shape).copy()
    place[:, 1:][ranked[:, 1:] == ranked[:, :-1]] = 0
    colder = np.empty_like(place)
    np.put_along_axis(colder, order, np.maximum.accumulate(place, axis=1), axis=1)
    share = colder / np.isfinite(padded).sum(axis=1, keepdims=True).clip(1)
    return np.searchsorted(edges, share, side="right")


def parent_damage(table: TableSnapshot, observation: Observation, policy: Policy) -> np.ndarray:
    """(W, R), d-hat of lowering each row from the parent width to each width; 0 at the parent itself."""
    _, multiplier = routing_buckets(table, observation, policy)
    width_index = np.arange(len(table.widths))[:, None]
    parent = np.full(len(table.committed), len(table.widths) - 1)
    damage = transition_damage(table, observation, policy, multiplier, parent, width_index)
    damage[-1] = 0.0
    return damage


def transition_damage(
    table: TableSnapshot,
    observation: Observation,
    policy: Policy,
    multiplier: np.ndarray,
    high: np.ndarray,
    low: np.ndarray,
) -> np.ndarray:
    """(W, R), d-hat (Eq. 8) of lowering each row from width index high to low, which broadcast to (W, R)."""
    rows = np.arange(len(table.committed))
    sensitivity = policy.sensitivity
    damage = global_damage(sensitivity[rows, high], sensitivity[rows, low])
    factor = prompt_factor(table, observation, policy, high, low)
    return predicted_damage(damage, multiplier, factor, policy.epsilon)


def prompt_factor(
    table: TableSnapshot, observation: Observation, policy: Policy, high: np.ndarray, low: np.ndarray
) -> np.ndarray | float:
    """eta (Eq. 6) of each transition; 1 without features or where a row's features are not finite."""
    if observation.features is None or policy.alpha == 0.0:
        return 1.0
    head = (table.projection, high, low)
    confidence = policy.head_confidence[head]
    if observation.confidence is not None:
        confidence = confidence * observation.confidence
    usable = np.isfinite(observation.features).all(axis=1)
    features = np.where(usable[:, None], observation.features, 0.0)
    rho = log_residual(policy.head_weights[head], policy.head_bias[head], features)
    rho_min, rho_max = observation.rho_bounds or (policy.rho_min, policy.rho_max)
    return residual_factor(rho, confidence * usable, policy.alpha, rho_min, rho_max)


def lowest_index(
    scores: Scores, table: TableSnapshot, observation: Observation, policy: Policy, stage: int, level: int
) -> np.ndarray:
    """(R,) index of the lowest width that a bitwidth-floor stage, a depth-cap level and the pins leave each row."""
    floor = np.searchsorted(table.widths, policy.floors[stage])[scores.bucket]
    lowest = np.maximum(floor, scores.committed - policy.depth_caps[level][scores.bucket])
    pins = observation.limits.lowest_bits
    if pins is not None:
        lowest = np.maximum(lowest, np.searchsorted(table.widths, pins))
    return np.where(scores.movable, np.minimum(lowest, scores.committed), scores.committed)
