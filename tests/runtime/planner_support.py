"""Random page tables, policies and observations for the planner's tests, and what a plan does to a table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits, Observation
from pagedweight.runtime.planner import Plan
from pagedweight.runtime.table_view import TableSnapshot


class Problem(NamedTuple):
    table: TableSnapshot
    observation: Observation
    policy: Policy

    def under_pressure(self, target_bytes: int) -> Observation:
        """The observation with a target D of target_bytes, Eq. (7) with one-byte blocks."""
        return self.observation._replace(kv=KVState(0, 1), threshold_blocks=target_bytes - 1)

    def held_bytes(self) -> int:
        index = np.searchsorted(self.table.widths, self.table.committed)
        return int(self.table.bytes[np.arange(len(index)), index].sum())

    def floor_bytes(self) -> int:
        return int(self.table.bytes[:, 0].sum())


def layout_of(experts: tuple[int, ...], widths: tuple[int, ...]) -> Layout:
    layers = tuple(MoeLayer(2 * at + 1, count, 8, 4) for at, count in enumerate(experts))
    return Layout(layers, widths, dict.fromkeys(widths, "lut16"))


def table_of(layout: Layout, rng: np.random.Generator, *, mixed: bool = False) -> TableSnapshot:
    """Every row at the parent width, or at mixed widths with some rows in transfer."""
    rows, widths = layout.rows, layout.widths
    steps = 128 * rng.integers(1, 9, (rows, len(widths)))
    committed = rng.choice(widths, rows) if mixed else np.full(rows, widths[-1])
    index = {layer.layer: at for at, layer in enumerate(layout.moe_layers)}
    identity = np.array([(index[b.layer], b.expert, int(b.projection)) for b in layout.blocks()])
    return TableSnapshot(
        widths=widths,
        committed=committed,
        desired=committed,
        bytes=np.cumsum(steps, axis=1),
        busy=rng.random(rows) < (0.1 if mixed else 0.0),
        since=rng.integers(0, 8, rows),
        layer=identity[:, 0],
        expert=identity[:, 1],
        projection=identity[:, 2],
    )


def policy_of(layout: Layout, rng: np.random.Generator, buckets: int = 1, stages: int = 1, levels: int = 1) -> Policy:
    """Damage that mostly falls with width; some blocks cost nothing. With buckets come floors, caps and heads."""
    rows, widths = layout.rows, np.array(layout.widths)
    spread = np.exp(rng.normal(0, 2, (rows, 1)) + rng.normal(0, 0.5, (rows, len(widths))))
    s_bar = spread * 4.0**-widths * (rng.random((rows, 1)) > 0.1)
    floors = -np.sort(-rng.choice(widths[:-1] if len(widths) > 1 else widths, (stages, buckets)), axis=0)
    shape = (2, len(widths), len(widths))
    return Policy.from_sensitivity(layout, s_bar, np.repeat(rng.gamma(0.5, 1, rows // 2), 2)).replaced(
        bucket_edges=np.linspace(0, 1, buckets + 1)[1:-1],
        multipliers=np.sort(rng.gamma(2, 0.5, buckets)),
        floors=floors,
        depth_caps=np.sort(rng.integers(1, len(widths) + 1, (levels, buckets)), axis=0),
        head_weights=rng.normal(0, 0.2, (*shape, 3)),
        head_bias=rng.normal(0, 0.2, shape),
        head_confidence=rng.random(shape),
        feature_center=rng.normal(2, 0.5, (rows, 3)),
        alpha=float(rng.random()),
    )


def observation_of(layout: Layout, rng: np.random.Generator, *, signals: bool, pins: bool) -> Observation:
    rows, experts = layout.rows, max(layer.experts for layer in layout.moe_layers)
    lowest = np.where(rng.random(rows) < 0.2, rng.choice(layout.widths, rows), layout.floor_width) if pins else None
    seen = Observation(KVState(1, 128), 0, limits=Limits(lowest_bits=lowest))
    if not signals:
        return seen
    mass = rng.dirichlet(np.full(experts, 0.3), len(layout.moe_layers)) * (rng.random(experts) > 0.3)
    return seen._replace(mass=mass, features=rng.normal(2, 1, (rows, 3)), confidence=rng.random(rows))


def random_problem(seed: int) -> Problem:
    """Anything the planner may meet: 1 to 3 layers of 1 to 6 experts, any widths, floors, caps, pins, signals."""
    rng = np.random.default_rng(seed)
    widths = tuple(sorted(rng.choice(np.arange(2, 9), rng.integers(1, 6), replace=False).tolist()))
    layout = layout_of(tuple(rng.integers(1, 7, rng.integers(1, 4)).tolist()), widths)
    buckets, stages, levels = rng.integers(1, 4, 3)
    return Problem(
        table_of(layout, rng, mixed=bool(rng.integers(2))),
        observation_of(layout, rng, signals=bool(rng.integers(2)), pins=bool(rng.integers(2))),
        policy_of(layout, rng, buckets, stages, levels),
    )


problems = st.integers(0, 2**32 - 1).map(random_problem)


def parent_problem(experts: tuple[int, ...], widths: tuple[int, ...] = (2, 3, 4, 6), seed: int = 0) -> Problem:
    """Every row at the parent width, sensitivity alone (no floors, caps or signals)."""
    rng = np.random.default_rng(seed)
    layout = layout_of(experts, widths)
    table, observation = table_of(layout, rng), observation_of(layout, rng, signals=False, pins=False)
    known = policy_of(layout, rng)
    return Problem(table, observation, Policy.from_sensitivity(layout, known.s_bar, known.m_cal))


def carried_out(table: TableSnapshot, plan: Plan) -> TableSnapshot:
    """The table after a plan, its rows just changed."""
    committed, since = table.committed.copy(), table.since + 1
    for transition in plan.transitions:
        assert committed[transition.row] == transition.from_bits
        committed[transition.row], since[transition.row] = transition.to_bits, 0
    return table._replace(committed=committed, desired=committed, since=since)


def named(table: TableSnapshot, plan: Plan) -> set[tuple[int, ...]]:
    """Transitions by what they are about, not by row number."""
    return {
        (*(int(column[t.row]) for column in (table.layer, table.expert, table.projection)), *t[1:])
        for t in plan.transitions
    }
