"""Raising as a plan: which linear-blocks come back when there is room, by the damage that this takes back."""

from __future__ import annotations

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_allocate import least_damage_index
from pagedweight.runtime.planner_buckets import routing_of
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
    stays = table.busy | (table.since < observation.limits.dwell_steps)
    start = np.where(stays, committed, np.int8(len(table.widths) - 1))
    room = _room_bytes(table, observation, committed, available_bytes)
    if room <= 0 or (start == committed).all():
        return EMPTY_PLAN
    needed, recovered = raise_points(table, observation, policy, committed)
    reached = _best_fill(needed, recovered, committed, start, room)
    moved = np.flatnonzero(reached != committed)
    to = reached[moved]
    moves = transitions(table, committed, reached, names)
    return Plan(moves, -float(recovered[to, moved].sum()), -int(needed[to, moved].sum()), 0)


def raise_points(
    table: TableSnapshot, observation: Observation, policy: Policy, committed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(W, R) bytes needed and damage taken back by raising each row to each width; both 0 at the committed one."""
    routing = routing_of(observation, policy)
    recovered = transition_damage(table, observation, policy, routing, committed, raising=True)
    recovered[committed, np.arange(len(committed))] = 0.0
    return bytes_above(table, committed), recovered


def _best_fill(
    needed: np.ndarray, recovered: np.ndarray, committed: np.ndarray, start: np.ndarray, room_bytes: int
) -> np.ndarray:
    """(R,) width index from committed up to start that takes back the most within room_bytes.

    Seen from above: all of them raised to start, then lowered, at the least loss, until they fit.
    """
    rows, width_index = np.arange(len(start)), np.arange(len(needed))[:, None]
    legal = (width_index >= committed) & (width_index <= start)
    lost = np.where(legal, recovered[start, rows] - recovered, np.inf)
    released = needed[start, rows] - needed
    return least_damage_index(released, lost, start, int(needed[start, rows].sum()) - room_bytes)


def _room_bytes(table: TableSnapshot, observation: Observation, committed: np.ndarray, available_bytes: int) -> int:
    limits = observation.limits
    room = available_bytes
    if limits.weight_bytes is not None:
        held = int(table.bytes[np.arange(len(committed)), committed].sum())
        room = min(room, limits.weight_bytes - held)
    return room if limits.raise_bytes is None else min(room, limits.raise_bytes)
