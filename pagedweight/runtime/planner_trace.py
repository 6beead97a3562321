"""A trace of planner steps as JSON lines, complete enough to be replayed bit for bit.

The first line holds what never changes (widths, M_i^b, identities, a digest of the policy); each further line one step:
what was seen, and the plan that came of it. Arrays are base64 of their bytes, so nothing is rounded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Plan, Queue, plan_from_queue, plan_raise, plan_step
from pagedweight.runtime.planner_trace_lines import TRACE_VERSION, TraceError, pack, read_trace
from pagedweight.runtime.table_view import TableSnapshot

_FIXED = ("bytes", "layer", "expert", "projection")
_SIGNALS = ("mass", "routed", "features", "confidence")
_CHANGING = ("committed", "desired", "busy", "since")


class Replayed(NamedTuple):
    """One step of a trace: its number, the plan that was recorded and the plan that the same inputs give now."""

    step: int
    recorded: Plan
    replayed: Plan | None

    @property
    def same(self) -> bool:
        return self.recorded == self.replayed


class TraceWriter:
    """Appends planner steps to a text file, in the order in which their queues follow each other."""

    @classmethod
    def to(cls, path: str | Path, table: TableSnapshot, policy: Policy, arena_bytes: int | None = None) -> TraceWriter:
        """A trace in a new file; every line is on disk when it is written. OSError when there can be none."""
        return cls(open(path, "w", buffering=1, encoding="utf-8"), table, policy, arena_bytes)

    def __init__(self, file: TextIO, table: TableSnapshot, policy: Policy, arena_bytes: int | None = None) -> None:
        """arena_bytes: what weights and KV cache share, for a reader; None where each has memory of its own."""
        self._file = file
        self._write(
            trace_version=TRACE_VERSION,
            policy=digest(policy),
            arena_bytes=arena_bytes,
            widths=list(table.widths),
            **{name: pack(getattr(table, name)) for name in _FIXED},
        )

    def lowered(self, table: TableSnapshot, observation: Observation, plan: Plan) -> None:
        """Record a plan_step, also one whose plan is empty: its queue matters to later ones."""
        self._write(verb="lower", **_seen(table, observation), plan=plan)

    def chosen(self, table: TableSnapshot, observation: Observation, plan: Plan) -> None:
        """Record a plan_from_queue that found one."""
        self._write(verb="choose", **_seen(table, observation), plan=plan)

    def raised(self, table: TableSnapshot, observation: Observation, available_bytes: int, plan: Plan) -> None:
        """Record a plan_raise."""
        self._write(verb="raise", **_seen(table, observation), available_bytes=int(available_bytes), plan=plan)

    def close(self) -> None:
        self._file.close()

    def _write(self, **record: object) -> None:
        self._file.write(json.dumps(record) + "\n")


def replay(lines: Iterable[str], policy: Policy) -> Iterator[Replayed]:
    """Plan every recorded step again. TraceError when the trace is damaged, another version's or another policy's."""
    head, steps = read_trace(lines)
    own = policy.experts
    same_rows = head.table.widths == policy.widths and all(
        np.array_equal(*pair) for pair in zip(head.table[-3:], (own.layer, own.expert, own.projection), strict=True)
    )
    if head.policy != digest(policy) or not same_rows:
        raise TraceError("the trace was recorded with another policy; replay it with the one of its checkpoint")
    queue = Queue()
    for number, step in enumerate(steps):
        if step.verb == "raise":
            plan = plan_raise(step.table, step.observation, policy, step.available_bytes)
        elif step.verb == "choose":
            plan = plan_from_queue(step.table, step.observation, policy, queue)
        else:
            queue, plan = plan_step(step.table, step.observation, policy, queue)
        yield Replayed(number, step.plan, plan)


def digest(policy: Policy) -> str:
    """SHA-256 of everything a policy holds."""
    content = hashlib.sha256()
    for name in sorted(policy.__dataclass_fields__):
        value = getattr(policy, name)
        content.update(f"{name}={value.tobytes().hex() if isinstance(value, np.ndarray) else value!r};".encode())
    return content.hexdigest()


def _seen(table: TableSnapshot, observation: Observation) -> dict[str, object]:
    fields = observation._asdict()
    arrays = {name: pack(fields[name]) for name in _SIGNALS}
    limits = observation.limits._asdict()
    limits["lowest_bits"] = pack(limits["lowest_bits"])
    limits["damage"] = limits["damage"] if math.isfinite(limits["damage"]) else None
    seen = {**fields, **arrays, "kv": list(observation.kv), "limits": limits}
    return {"observation": seen, **{name: pack(getattr(table, name)) for name in _CHANGING}}
