"""A run as series over its planner steps, read from the runtime's trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pagedweight.runtime.planner_trace import TRACE_VERSION, records_of, unpack

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
    records = records_of(lines)
    head = next(records, {})
    if head.get("trace_version") != TRACE_VERSION:
        raise ValueError(
            f"the file's first line has trace_version {head.get('trace_version')}, not {TRACE_VERSION}; give a file "
            "that RuntimeConfig(trace_path=...) wrote with this release"
        )
    widths, held, layer = tuple(head["widths"]), unpack(head["bytes"]), unpack(head["layer"])
    steps = [_step(record, widths, held, layer) for record in records]
    if not steps:
        raise ValueError("the trace has no planner step; the run was never near its budget")
    columns = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    arena = head.get("arena_bytes")
    kv = None if arena is None else np.maximum(0, arena - columns["weight_bytes"] - columns["free_bytes"])
    return Run(widths=widths, step=np.arange(len(steps)), kv_bytes=kv, **columns)


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


def _step(record: dict, widths: tuple[int, ...], held: np.ndarray, layer: np.ndarray) -> dict[str, object]:
    committed = unpack(record["committed"])
    at = np.searchsorted(widths, committed)
    free_blocks, block_bytes = record["observation"]["kv"][:2]
    moves, damage, _, shortfall = record["plan"]
    lowered = [move for move in moves if move[2] < move[1]]
    raised = [move for move in moves if move[2] > move[1]]
    return {
        "weight_bytes": int(np.take_along_axis(held, at[:, None], axis=1).sum()),
        "free_bytes": free_blocks * block_bytes,
        "mean_bits": float(committed.mean()),
        "layer_bits": np.bincount(layer, committed) / np.bincount(layer),
        "rows_at_width": np.bincount(at, minlength=len(widths)),
        "lowered": len(lowered),
        "raised": len(raised),
        "released_bytes": sum(move[3] for move in lowered),
        "loaded_bytes": sum(move[3] for move in raised),
        "damage": float(damage),
        "shortfall_bytes": int(shortfall),
    }
