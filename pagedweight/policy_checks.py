"""What a policy must hold to be used: shapes, signs and order, each refused in a sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pagedweight.layout import Projection

if TYPE_CHECKING:
    from pagedweight.policy import Policy

FEATURE_TRANSFORMS = ("raw", "log")
ARRAYS = (
    *("s_bar", "m_cal", "bucket_edges", "multipliers"),
    *("head_weights", "head_bias", "head_confidence", "feature_center"),
)
INTEGER_ARRAYS = ("blocks", "floors", "depth_caps")
PLACES_PER_ROW = 256  # one rank of a model that is split by experts over many has few rows of many experts
SCALARS = ("alpha", "rho_min", "rho_max", "epsilon", "mass_trust")


def check_policy(policy: Policy) -> None:
    """ValueError unless every field is of the right shape and within its limits."""
    _check_shapes(policy)
    _check_blocks(policy)
    _check_sensitivity(policy)
    _check_values(policy)
    _check_constraints(policy)


def _check_shapes(policy: Policy) -> None:
    rows, width_count = policy.m_cal.size, len(policy.widths)
    buckets = policy.multipliers.size
    expected = {
        "blocks": (rows, 3),
        "m_cal": (rows,),
        "s_bar": (rows, width_count),
        "bucket_edges": (max(buckets - 1, 0),),
        "multipliers": (max(buckets, 1),),
        "floors": (max(policy.floors.shape[0], 1) if policy.floors.ndim else 1, buckets),
        "depth_caps": (max(policy.depth_caps.shape[0], 1) if policy.depth_caps.ndim else 1, buckets),
        "head_weights": (2, width_count, width_count, 3),
        "head_bias": (2, width_count, width_count),
        "head_confidence": (2, width_count, width_count),
        "feature_center": (rows, 3),
    }
    for name, shape in expected.items():
        if getattr(policy, name).shape != shape:
            raise ValueError(f"policy {name} has shape {getattr(policy, name).shape}; it must be {shape}")


def _check_blocks(policy: Policy) -> None:
    """Rows name linear-blocks of a model: the planner's tables over (layer, expert) are then about as large as they."""
    layer, expert, projection = policy.blocks.T
    if (policy.blocks < 0).any() or (projection > 1).any() or len(np.unique(policy.blocks, axis=0)) < policy.rows:
        raise ValueError("policy blocks must be (layer, expert, projection 0 or 1), each once; calibrate again")
    if policy.rows and len(np.unique(layer)) * (int(expert.max()) + 1) > PLACES_PER_ROW * policy.rows + 1024:
        raise ValueError(f"policy blocks name expert {int(expert.max())} in {policy.rows} rows; calibrate again")


def _check_values(policy: Policy) -> None:
    for name in (*ARRAYS, *INTEGER_ARRAYS):
        if not np.isfinite(getattr(policy, name)).all():
            raise ValueError(f"policy {name} holds a value that is not finite; calibrate again")
    for name in ("m_cal", "multipliers", "head_confidence"):
        if (getattr(policy, name) < 0).any():
            raise ValueError(f"policy {name} holds a negative value; calibrate again")
    for name in SCALARS:
        if not math.isfinite(getattr(policy, name)):
            raise ValueError(f"policy {name} is {getattr(policy, name)}; it must be finite")
    if not 0 <= policy.mass_trust <= 1:
        raise ValueError(f"policy mass_trust is {policy.mass_trust}; it is a share, from 0 to 1")
    if (policy.head_confidence > 1).any():
        raise ValueError("policy head_confidence exceeds 1; it is a share")
    if policy.alpha < 0 or policy.epsilon <= 0 or policy.rho_min > policy.rho_max:
        raise ValueError(
            f"policy alpha {policy.alpha} must not be negative, epsilon {policy.epsilon} must be positive, and "
            f"rho_min {policy.rho_min} must not exceed rho_max {policy.rho_max}"
        )
    if policy.feature_transform not in FEATURE_TRANSFORMS:
        raise ValueError(
            f"policy feature_transform is {policy.feature_transform!r}; use {' or '.join(FEATURE_TRANSFORMS)}"
        )


def _check_constraints(policy: Policy) -> None:
    """Buckets, floors and caps."""
    edges = policy.bucket_edges
    if ((edges <= 0) | (edges >= 1)).any() or (np.diff(edges) <= 0).any():
        raise ValueError(f"policy bucket_edges are {edges.tolist()}; give ascending shares between 0 and 1")
    if not np.isin(policy.floors, policy.widths).all():
        raise ValueError(f"policy floors {policy.floors.tolist()} are not all among the widths {policy.widths}")
    if (np.diff(policy.floors, axis=0) > 0).any():
        raise ValueError(
            f"policy floors {policy.floors.tolist()} rise from one stage to the next; order them downwards"
        )
    if (policy.depth_caps < 1).any() or (np.diff(policy.depth_caps, axis=0) < 0).any():
        raise ValueError(f"policy depth_caps {policy.depth_caps.tolist()} must be at least 1 and never tighten")


def _check_sensitivity(policy: Policy) -> None:
    bad = np.argwhere(~(np.isfinite(policy.s_bar) & (policy.s_bar >= 0)))
    if bad.size:
        row, width_index = bad[0]
        layer, expert, projection = policy.blocks[row]
        raise ValueError(
            f"policy s_bar of layers.{layer}.experts.{expert}.{Projection(int(projection)).label} for the transition "
            f"{policy.widths[-1]} -> {policy.widths[width_index]} bits is {policy.s_bar[row, width_index]}; "
            "it must be finite and not negative: calibrate again"
        )
