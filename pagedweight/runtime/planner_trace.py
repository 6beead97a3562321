"""A trace of planner steps as JSON lines, complete enough to be replayed bit for bit.

The first line holds what never changes (widths, M_i^b, identities, a digest of the policy); each further line one step:
what was seen, and the plan that came of it. Arrays are base64 of their bytes, so nothing is rounded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits, Observation
from pagedweight.runtime.planner import Plan, Queue, plan_from_queue, plan_raise, plan_step
from pagedweight.runtime.table_view import TableSnapshot, Transition

TRACE_VERSION = 3
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
            **{name: _pack(getattr(table, name)) for name in _FIXED},
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
    """Plan every recorded step again. ValueError when the trace is another version's or another policy's."""
    records = records_of(lines)
    head = next(records, {})
    if head.get("trace_version") != TRACE_VERSION:
        raise ValueError(f"the trace has version {head.get('trace_version')}; this release replays {TRACE_VERSION}")
    if head["policy"] != digest(policy):
        raise ValueError("the trace was recorded with another policy; replay it with the one of its checkpoint")
    fixed = {name: unpack(head[name]) for name in _FIXED}
    queue = Queue()
    for step, record in enumerate(records):
        changing = {name: unpack(record[name]) for name in _CHANGING}
        table = TableSnapshot(widths=tuple(head["widths"]), **fixed, **changing)
        observation = _observation(record["observation"])
        if record["verb"] == "raise":
            plan = plan_raise(table, observation, policy, record["available_bytes"])
        elif record["verb"] == "choose":
            plan = plan_from_queue(table, observation, policy, queue)
        else:
            queue, plan = plan_step(table, observation, policy, queue)
        moves, *rest = record["plan"]
        yield Replayed(step, Plan(tuple(map(Transition._make, moves)), *rest), plan)


def records_of(lines: Iterable[str]) -> Iterator[dict]:
    """A trace's lines as objects; ValueError names the first that is none."""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON ({error}); give a trace, or what is whole of it") from error
        if not isinstance(record, dict):
            raise ValueError(f"line {number} holds a {type(record).__name__}, not an object; give a trace")
        yield record


def digest(policy: Policy) -> str:
    """SHA-256 of everything a policy holds."""
    content = hashlib.sha256()
    for name in sorted(policy.__dataclass_fields__):
        value = getattr(policy, name)
        content.update(f"{name}={value.tobytes().hex() if isinstance(value, np.ndarray) else value!r};".encode())
    return content.hexdigest()


def _seen(table: TableSnapshot, observation: Observation) -> dict[str, object]:
    fields = observation._asdict()
    arrays = {name: _pack(fields[name]) for name in _SIGNALS}
    limits = observation.limits._asdict()
    limits["lowest_bits"] = _pack(limits["lowest_bits"])
    limits["damage"] = limits["damage"] if math.isfinite(limits["damage"]) else None
    seen = {**fields, **arrays, "kv": list(observation.kv), "limits": limits}
    return {"observation": seen, **{name: _pack(getattr(table, name)) for name in _CHANGING}}


def _observation(seen: dict[str, object]) -> Observation:
    limits = dict(seen["limits"])
    limits["lowest_bits"] = unpack(limits["lowest_bits"])
    limits["damage"] = math.inf if limits["damage"] is None else limits["damage"]
    arrays = {name: unpack(seen[name]) for name in _SIGNALS}
    bounds = None if seen["rho_bounds"] is None else tuple(seen["rho_bounds"])
    return Observation(
        **{**seen, **arrays, "kv": KVState(*seen["kv"]), "limits": Limits(**limits), "rho_bounds": bounds}
    )


def _pack(array: np.ndarray | None) -> dict[str, object] | None:
    if array is None:
        return None
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": content}


def unpack(packed: dict[str, object] | None) -> np.ndarray | None:
    """An array as a trace's lines hold it."""
    if packed is None:
        return None
    return np.frombuffer(base64.b64decode(packed["base64"]), dtype=packed["dtype"]).reshape(packed["shape"])
