"""ScoreActions of Algorithm 1: bytes and predicted damage of every transition, and what floors and caps permit.

Arrays over transitions are (W, R): entry [w, r] belongs to row r and widths[w].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.damage import global_damage, log_residual, predicted_damage, residual_factor
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_buckets import Routing, routing_of
from pagedweight.runtime.table_view import TableSnapshot


class Scores(NamedTuple):
    """What the greedy needs to know about each row at one step.

    committed: (R,) index of the committed width. movable: bool (R,). bucket: (R,).
    released: float64 (W, R), whole bytes freed by moving to each width (negative: needed).
    damage: (W, R), d-hat of moving to each lower width; 0 at the committed one, meaningless above. Under a damage
        limit it is what the move adds to the damage against the parent width, which the limit is about.
    most_damage: what a plan may still add under the limit, infinite without one.
    """

    committed: np.ndarray
    movable: np.ndarray
    bucket: np.ndarray
    released: np.ndarray
    damage: np.ndarray
    most_damage: float = math.inf


def score_actions(table: TableSnapshot, observation: Observation, policy: Policy) -> Scores:
    """Bytes and predicted damage (Eq. 8) of every lowering; floors and caps are not yet applied."""
    committed = committed_index(table)
    routing = routing_of(observation, policy)
    released = np.negative(bytes_above(table, committed))
    if observation.limits.damage < math.inf:
        damage = parent_damage(table, observation, policy)
        now = at_width(damage, committed)
        left = observation.limits.damage - float(now.sum())
        return Scores(committed, ~table.busy, routing.bucket, released, damage - now, left)
    damage = transition_damage(table, observation, policy, routing, committed)
    damage.reshape(-1)[places(committed)] = 0.0
    return Scores(committed, ~table.busy, routing.bucket, released, damage)


def committed_index(table: TableSnapshot) -> np.ndarray:
    """(R,) index of each row's committed width."""
    index = np.zeros(table.widths[-1] + 1, dtype=np.int8)
    index[list(table.widths)] = np.arange(len(table.widths))
    return index.take(table.committed)


def bytes_above(table: TableSnapshot, index: np.ndarray) -> np.ndarray:
    """float64 (W, R), whole bytes that each width needs beyond the width that index (R,) names."""
    memory = table.bytes.T.astype(np.float64, order="C")
    memory -= at_width(memory, index)
    return memory


def places(index: np.ndarray) -> np.ndarray:
    """(R,) places of each row's width index in a flattened (W, R) array; taking by them is the fastest gather."""
    return index.astype(np.int64) * len(index) + np.arange(len(index))


def at_width(by_width: np.ndarray, index: np.ndarray) -> np.ndarray:
    """(R,) values of a (W, R) array at each row's width index."""
    return by_width.reshape(-1).take(places(index))


def transition_damage(
    table: TableSnapshot,
    observation: Observation,
    policy: Policy,
    routing: Routing,
    anchor: np.ndarray,
    *,
    raising: bool = False,
) -> np.ndarray:
    """(W, R), d-hat (Eq. 8) of lowering each row from width index anchor (R,) to each width; 0 for the parent width.

    raising: of lowering from each width to the anchor, which is what raising to that width takes back; 0 for the floor.
    """
    sensitivity = policy.s_bar_by_width
    at_anchor = at_width(sensitivity, anchor)
    widths = slice(1, None) if raising else slice(0, -1)
    ends = (sensitivity[widths], at_anchor) if raising else (at_anchor, sensitivity[widths])
    factor = prompt_factor(table, observation, policy, anchor, raising=raising)
    damage = np.zeros(sensitivity.shape)
    # s is s_bar times a mass: that mass multiplies g as mu does.
    weight = routing.multiplier * routing.mass
    damage[widths] = predicted_damage(global_damage(*ends), weight, factor, policy.epsilon)
    return damage


def prompt_factor(
    table: TableSnapshot, observation: Observation, policy: Policy, anchor: np.ndarray, *, raising: bool
) -> np.ndarray | float:
    """(W - 1, R), eta (Eq. 6) of the same transitions; 1 without features, or where a row's are not finite."""
    if observation.features is None or policy.alpha == 0.0:
        return 1.0
    # A row's heads are those of its projection and anchor: one gather for all coefficients of all other ends.
    ends = slice(1, None) if raising else slice(0, -1)
    group = policy.experts.projection * len(table.widths) + anchor
    w1, w2, w3, bias, trust = policy.heads[0 if raising else 1][:, ends].take(group, axis=2)
    trust *= observation.confidence if observation.confidence is not None else 1.0
    features = np.ascontiguousarray((observation.features - policy.feature_center).T)
    usable = np.isfinite(features.sum(axis=0))
    if not usable.all():
        features, trust = np.where(usable, features, 0.0), trust * usable
    rho = log_residual((w1, w2, w3), bias, features)
    rho_min, rho_max = observation.rho_bounds or (policy.rho_min, policy.rho_max)
    return residual_factor(rho, trust, policy.alpha, rho_min, rho_max)


def parent_damage(table: TableSnapshot, observation: Observation, policy: Policy) -> np.ndarray:
    """(W, R), d-hat of lowering each row from the parent width to each width; 0 at the parent itself."""
    routing = routing_of(observation, policy)
    parent = np.full(len(table.committed), len(table.widths) - 1)
    return transition_damage(table, observation, policy, routing, parent)


def damage_now_and_at_floor(
    table: TableSnapshot, observation: Observation, policy: Policy
) -> tuple[np.ndarray, np.ndarray]:
    """(R,) twice: every row's predicted damage against the parent width, as it is and at the floor."""
    damage = parent_damage(table, observation, policy)
    return at_width(damage, committed_index(table)), damage[0]


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


def canonical(
    table: TableSnapshot, observation: Observation, policy: Policy
) -> tuple[TableSnapshot, Observation, Policy, np.ndarray | None]:
    """The same step with rows ordered by (layer, expert, projection), which breaks every tie, and the rows' numbers.

    The numbers are None where the rows already are in that order, as every Layout's are. ValueError when the policy
    and the table do not describe the same rows and widths.
    """
    if policy.widths != tuple(table.widths) or policy.rows != len(table.committed):
        raise ValueError(
            f"the policy has {policy.rows} rows of widths {policy.widths}, the page table {len(table.committed)} rows "
            f"of widths {tuple(table.widths)}; calibrate for this checkpoint"
        )
    known = policy.experts
    for name in ("layer", "expert", "projection"):
        if not np.array_equal(getattr(table, name), getattr(known, name)):
            raise ValueError(f"the policy and the page table name another {name} for a row; calibrate again")
    if known.in_order:
        return table, observation, policy, None
    order = np.lexsort((table.projection, table.expert, table.layer))
    table = TableSnapshot(table.widths, *(column[order] for column in table[1:]))
    pins = observation.limits.lowest_bits
    observation = observation._replace(
        features=None if observation.features is None else observation.features[order],
        confidence=None if observation.confidence is None else observation.confidence[order],
        limits=observation.limits._replace(lowest_bits=None if pins is None else pins[order]),
    )
    rows = {name: getattr(policy, name)[order] for name in ("blocks", "s_bar", "m_cal", "feature_center")}
    return table, observation, policy.replaced(**rows), order
