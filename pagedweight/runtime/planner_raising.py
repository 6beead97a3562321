"""Raising as a plan: which linear-blocks come back first when there is room, by damage recovered per byte."""

from __future__ import annotations

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_buckets import routing_buckets
from pagedweight.runtime.planner_greedy import Steps, hull_steps
from pagedweight.runtime.planner_queue import EMPTY_PLAN, Plan, transitions
from pagedweight.runtime.planner_scores import bytes_above, canonical, committed_index, transition_damage
from pagedweight.runtime.table_view import TableSnapshot


def plan_raise(table: TableSnapshot, observation: Observation, policy: Policy, available_bytes: int) -> Plan:
    """The raises within available_bytes that take back the most predicted damage.

    Rows in transfer and rows that changed within limits.dwell_steps stay; limits.weight_bytes and limits.raise_bytes
    bound the plan. When to call is the caller's: only while more KV blocks than the reload threshold stay free.
    """
    table, observation, policy, names = canonical(table, observation, policy)
    committed = committed_index(table)
    room = _room_bytes(table, observation, committed, available_bytes)
    still = table.busy | (table.since < observation.limits.dwell_steps) | (committed == len(table.widths) - 1)
    if room <= 0 or still.all():
        return EMPTY_PLAN
    needed, damage = raise_points(table, observation, policy, committed)
    steps = hull_steps(np.where(still, 0.0, needed), damage, committed, np.arange(len(table.widths), dtype=np.int8))
    reached = _fill(steps, committed, room)
    rows = np.arange(len(committed))
    moved = np.flatnonzero(reached != committed)
    recovered = float(damage[reached[moved], moved].sum())
    moves = transitions(table, committed, reached, names)
    return Plan(moves, recovered, -int(needed[reached, rows].sum()), 0)


def raise_points(
    table: TableSnapshot, observation: Observation, policy: Policy, committed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(W, R) bytes needed and damage taken back (negative) by raising each row to each higher width."""
    _, multiplier = routing_buckets(table, observation, policy)
    damage = -transition_damage(table, observation, policy, multiplier, committed, raising=True)
    return bytes_above(table, committed), damage


def _room_bytes(table: TableSnapshot, observation: Observation, committed: np.ndarray, available_bytes: int) -> int:
    limits = observation.limits
    room = available_bytes
    if limits.weight_bytes is not None:
        held = int(table.bytes[np.arange(len(committed)), committed].sum())
        room = min(room, limits.weight_bytes - held)
    return room if limits.raise_bytes is None else min(room, limits.raise_bytes)


def _fill(steps: Steps, start: np.ndarray, room_bytes: int) -> np.ndarray:
    """(R,) width index after taking, best first, every step that still fits; a row stops at its first that does not."""
    count = int(np.searchsorted(steps.bytes, room_bytes, side="right"))
    reached = steps.reached(start, count)
    left = room_bytes - steps.totals(count)[0]
    step_bytes = np.diff(steps.bytes, prepend=0)
    rest = np.flatnonzero(step_bytes[count:] <= left) + count
    for step in rest.tolist():
        row = steps.row[step]
        if step_bytes[step] <= left and steps.origin[step] == reached[row]:
            reached[row] = steps.to[step]
            left -= int(step_bytes[step])
    return reached
