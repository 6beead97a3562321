"""Why the planner did what it did, and what it would do: explanations and dry runs, as values."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Plan, Queue, plan_raise, plan_step
from pagedweight.runtime.planner_buckets import routing_of
from pagedweight.runtime.planner_scores import (
    Scores,
    canonical,
    committed_index,
    lowest_index,
    parent_damage,
    score_actions,
)
from pagedweight.runtime.planner_stages import legal_steps
from pagedweight.runtime.table_view import TableSnapshot

GIB = 2**30


class Outlook(NamedTuple):
    """What some bytes more or less would mean: the plan that frees them, and the plan that puts them to use."""

    asked_bytes: int
    lowering: Plan
    raising: Plan

    def __str__(self) -> str:
        short = f", {self.lowering.shortfall_bytes} short" if self.lowering.shortfall_bytes else ""
        return (
            f"freeing {self.asked_bytes} bytes would lower {len(self.lowering.transitions)} linear-blocks for "
            f"predicted damage {self.lowering.damage:.4g}{short}; {self.asked_bytes} bytes more would raise "
            f"{len(self.raising.transitions)} and take back {abs(self.raising.damage):.4g}"
        )


class Explanation(NamedTuple):
    """One linear-block as the planner sees it.

    mass: routing mass of its expert, live and calibrated blended, in calibration's units.
    damage: predicted damage of its committed width against the parent width; bytes: released by that.
    price: damage per released byte so far (0 at the parent width). next_price: of its next step, infinite if none.
    cheapest_price: of the cheapest step that any block could take now.
    limits: what keeps the block from going lower, in words; empty when it may reach the lowest width.
    """

    row: int
    bits: int
    parent_bits: int
    bucket: int
    multiplier: float
    mass: float
    damage: float
    bytes: int
    price: float
    next_price: float
    cheapest_price: float
    limits: tuple[str, ...]
    outlook: Outlook

    def __str__(self) -> str:
        further = "no further step is open" if math.isinf(self.next_price) else f"its next costs {self.next_price:.4g}"
        if self.bits == self.parent_bits:
            why = f"at the parent width of {self.bits} bits, in damage per byte {further}"
        else:
            why = (
                f"lowered from {self.parent_bits} to {self.bits} bits for {self.bytes} bytes at predicted damage "
                f"{self.damage:.4g}, {self.price:.4g} per byte; {further}"
            )
        limits = f"; limited by {', '.join(self.limits)}" if self.limits else ""
        return (
            f"{why}, the cheapest step of any block {self.cheapest_price:.4g}; routing mass {self.mass:.4g}, bucket "
            f"{self.bucket}, multiplier {self.multiplier:.4g}{limits}; {self.outlook}"
        )


def outlook(table: TableSnapshot, observation: Observation, policy: Policy, bytes_: int = GIB) -> Outlook:
    """A dry run both ways: nothing moves, no pressure is needed, dwell times and limits hold."""
    asked = observation._replace(kv=KVState(0, bytes_), threshold_blocks=0, forecast_blocks=0, in_flight_bytes=0)
    _, lowering = plan_step(table, asked, policy, Queue())
    return Outlook(bytes_, lowering, plan_raise(table, observation, policy, bytes_))


def explain(
    table: TableSnapshot, observation: Observation, policy: Policy, row: int, more_bytes: int = GIB
) -> Explanation:
    """Why a row has its width, what it cost, what binds it, and what more_bytes more would free or restore."""
    if not 0 <= row < policy.rows:
        raise ValueError(f"row is {row}; the page table has rows 0 to {policy.rows - 1}")
    ahead = outlook(table, observation, policy, more_bytes)
    table, observation, policy, names = canonical(table, observation, policy)
    at = row if names is None else int(np.flatnonzero(names == row)[0])
    scores = score_actions(table, observation, policy)
    routing = routing_of(observation, policy)
    index = int(committed_index(table)[at])
    damage = float(parent_damage(table, observation, policy)[index, at])
    released = int(table.bytes[at, -1] - table.bytes[at, index])
    steps = legal_steps(scores, lowest_index(scores, table, observation, policy, -1, -1))
    price = np.diff(steps.damage, prepend=0) / np.diff(steps.bytes, prepend=0)
    own = price[steps.row == at]
    return Explanation(
        row,
        int(table.committed[at]),
        table.widths[-1],
        int(routing.bucket[at]),
        float(routing.multiplier[at]),
        float(routing.mass[at]),
        damage,
        released,
        damage / released if released else 0.0,
        float(own[0]) if own.size else float("inf"),
        float(price[0]) if price.size else float("inf"),
        _limits(table, observation, policy, scores, at),
        ahead,
    )


def _limits(
    table: TableSnapshot, observation: Observation, policy: Policy, scores: Scores, row: int
) -> tuple[str, ...]:
    """What keeps a row above the lowest width."""
    widths, bucket, committed = table.widths, int(scores.bucket[row]), int(scores.committed[row])
    found = []
    if table.busy[row]:
        found.append("a transfer in progress")
    stages = [int(floor) for floor in policy.floors[:, bucket]]
    if stages[0] > widths[0]:
        found.append(f"bucket {bucket}'s floors of {', '.join(map(str, stages))} bits by stage")
    caps = [int(cap) for cap in policy.depth_caps[:, bucket]]
    if committed - caps[0] > 0:
        found.append(f"bucket {bucket}'s depth caps of {', '.join(map(str, caps))} widths a plan by level")
    pins = observation.limits.lowest_bits
    if pins is not None and pins[row] > widths[0]:
        found.append(f"a pin at {int(pins[row])} bits")
    return tuple(found)
