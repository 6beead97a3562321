"""A run as series over its planner steps, read from the runtime's trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pagedweight.runtime.planner_trace_lines import Step, read_trace

_CURVES = ("weight_bytes", "free_bytes", "kv_bytes", "mean_bits", "layer_bits", "rows_at_width")
_SUMS = ("lowered", "raised", "released_bytes", "loaded_bytes", "damage")


class Run(NamedTuple):
    """S planner steps of L layers and W widths. What was seen before a step's plan, and what the plan did.

    step: int (S,), line of the trace. weight_bytes, free_bytes, kv_bytes: (S,), M_i^q over all rows, bytes of free KV
    blocks, and the rest of the arena; kv_bytes is None where the KV cache has memory of its own.
    mean_bits: (S,), over linear-blocks. layer_bits: (S, L). rows_at_width: (S, W).
    lowered, raised: rows that a step's plan moves. released_bytes, loaded_bytes: of these moves. damage: predicted.
    shortfall_bytes: what a plan could not release.
    """

    widths: tuple[int, ...]
    step: np.ndarray
    weight_bytes: np.ndarray
    free_bytes: np.ndarray
    kv_bytes: np.ndarray | None
    mean_bits: np.ndarray
    layer_bits: np.ndarray
    rows_at_width: np.ndarray
    lowered: np.ndarray
    raised: np.ndarray
    released_bytes: np.ndarray
    loaded_bytes: np.ndarray
    damage: np.ndarray
    shortfall_bytes: np.ndarray


def read_run(lines: Iterable[str]) -> Run:
    """ValueError when the lines are no trace of this version, or hold no step."""
    head, recorded = read_trace(lines)
    steps = [_step(step) for step in recorded]
    if not steps:
        raise ValueError("the trace has no planner step; the run was never near its budget")
    columns = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    kv = (
        None
        if head.arena_bytes is None
        else np.maximum(0, head.arena_bytes - columns["weight_bytes"] - columns["free_bytes"])
    )
    return Run(widths=head.table.widths, step=np.arange(len(steps)), kv_bytes=kv, **columns)


def totals_of(run: Run) -> dict[str, float]:
    """What a whole run comes to, of all its steps."""
    return {
        "planner_steps": int(run.step[-1]) + 1,
        "lowest_mean_bits": float(run.mean_bits.min()),
        "last_mean_bits": float(run.mean_bits[-1]),
        "lowered": int(run.lowered.sum()),
        "released_bytes": int(run.released_bytes.sum()),
        "raised": int(run.raised.sum()),
        "loaded_bytes": int(run.loaded_bytes.sum()),
        "largest_shortfall_bytes": int(run.shortfall_bytes.max()),
    }


def thinned(run: Run, points: int) -> Run:
    """At most so many points: curves as they are at the end of each stretch of steps, moves and damage summed up."""
    count = len(run.step)
    if count <= points:
        return run
    edges = np.linspace(0, count, points + 1).astype(int)
    last, first = edges[1:] - 1, edges[:-1]
    changed = {name: getattr(run, name)[last] for name in (*_CURVES, "step") if getattr(run, name) is not None}
    changed |= {name: np.add.reduceat(getattr(run, name), first) for name in _SUMS}
    changed["shortfall_bytes"] = np.maximum.reduceat(run.shortfall_bytes, first)
    return run._replace(**changed)


def _step(step: Step) -> dict[str, object]:
    table, plan = step.table, step.plan
    at = np.searchsorted(table.widths, table.committed)
    lowered = [move for move in plan.transitions if move.to_bits < move.from_bits]
    raised = [move for move in plan.transitions if move.to_bits > move.from_bits]
    return {
        "weight_bytes": int(np.take_along_axis(table.bytes, at[:, None], axis=1).sum()),
        "free_bytes": step.observation.kv.free_blocks * step.observation.kv.block_bytes,
        "mean_bits": float(table.committed.mean()),
        "layer_bits": np.bincount(table.layer, table.committed) / np.maximum(1, np.bincount(table.layer)),
        "rows_at_width": np.bincount(at, minlength=len(table.widths)),
        "lowered": len(lowered),
        "raised": len(raised),
        "released_bytes": sum(move.bytes for move in lowered),
        "loaded_bytes": sum(move.bytes for move in raised),
        "damage": plan.damage,
        "shortfall_bytes": plan.shortfall_bytes,
    }
