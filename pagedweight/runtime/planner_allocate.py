"""Widths of least damage within a number of bytes, for any damage table; no buckets, floors or caps."""

from __future__ import annotations

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_cover import cover
from pagedweight.runtime.planner_greedy import hull_steps
from pagedweight.runtime.table_view import TableSnapshot


def least_damage_index(released: np.ndarray, damage: np.ndarray, start: np.ndarray, target_bytes: int) -> np.ndarray:
    """(R,) width index of least total damage that releases target_bytes, or as much as is legal.

    start: (R,) width index to lower from. released, damage: float64 (W, R) totals by width, measured from start;
    damage is 0 there and infinite where a width is not legal.
    """
    legal = np.isfinite(damage)
    steps = hull_steps(np.where(legal, released, 0.0), np.where(legal, damage, 0.0))
    count = steps.meeting(target_bytes)
    if not count or steps.totals(count)[0] < target_bytes:
        return steps.reached(start, count)
    change = cover(steps, start, released, damage, target_bytes, count)
    index = steps.reached(start, change.count)
    index[list(change.rows)] = change.to
    return index


def row_mass(table: TableSnapshot, observation: Observation, policy: Policy) -> np.ndarray:
    """(R,) routing mass of each row's expert within its layer: live, or calibration's in a layer without tokens."""
    layer_total = np.bincount(table.layer, policy.m_cal)
    calibrated = policy.m_cal / np.maximum(layer_total[table.layer], 1e-30)
    if observation.mass is None:
        return calibrated
    live = observation.mass[table.layer, table.expert]
    return np.where(observation.mass.sum(axis=1)[table.layer] > 0, live, calibrated)
