"""The lines of a trace, checked before anything is planned from them: arrays of the right kind, shape and range."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pagedweight.documents import read_json
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits, Observation
from pagedweight.runtime.planner import Plan
from pagedweight.runtime.table_view import TableSnapshot, Transition

TRACE_VERSION = 3
VERBS = ("lower", "choose", "raise")
LARGEST_NUMBER = 2**53  # steps, blocks and bytes beyond are no measurements
MOST_EXPERTS = 2**16


class TraceError(ValueError):
    """A trace that is damaged or of another version; the message says which line and why."""


class Head(NamedTuple):
    """What never changes. policy: its digest. table: of the first step, with nothing committed. arena_bytes: of weights
    and KV cache together, None where each has memory of its own."""

    policy: str
    arena_bytes: int | None
    table: TableSnapshot


class Step(NamedTuple):
    """One planner step as it was recorded."""

    verb: str
    table: TableSnapshot
    observation: Observation
    available_bytes: int
    plan: Plan


def read_trace(lines: Iterable[str]) -> tuple[Head, Iterator[Step]]:
    """The head, and the steps as they are asked for. TraceError names the first line that is not one of a trace."""
    records = _records(lines)
    number, record = next(records, (1, {}))
    if record.get("trace_version") != TRACE_VERSION:
        raise TraceError(
            f"the first line has trace_version {record.get('trace_version')!r:.80}, not {TRACE_VERSION}; give a file "
            "that RuntimeConfig(trace_path=...) wrote with this release"
        )
    head = _line(number, _head, record)
    return head, (_line(number, _step, record, head.table) for number, record in records)


def _records(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        try:
            record = read_json(line)
        except ValueError as error:
            raise TraceError(f"line {number} is not JSON ({error}); give a trace, or what is whole of it") from error
        if not isinstance(record, dict):
            raise TraceError(f"line {number} holds a {type(record).__name__}, not an object; give a trace")
        yield number, record


def _line(number: int, read: Any, *arguments: Any) -> Any:
    """What read(*arguments) makes of a line, any complaint as a TraceError."""
    try:
        return read(*arguments)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"line {number} is damaged: {type(error).__name__}: {error}"[:500]) from error


def _head(record: dict[str, Any]) -> Head:
    widths = tuple(record["widths"])
    if not widths or widths != tuple(sorted(set(widths))) or not all(_whole(bits) and bits for bits in widths):
        raise ValueError("widths are not ascending whole numbers")
    held = _array(record, "bytes", "i", (None, len(widths)), low=1)
    rows = len(held)
    identity = [_array(record, name, "i", (rows,), high=MOST_EXPERTS) for name in ("layer", "expert", "projection")]
    nothing = np.zeros(rows, dtype=np.int64)
    arena_bytes = record.get("arena_bytes")
    if arena_bytes is not None:
        _check_whole(arena_bytes)
    if not isinstance(record["policy"], str) or not rows:
        raise ValueError("it has no policy or no rows")
    table = TableSnapshot(widths, nothing, nothing, held, nothing.astype(bool), nothing, *identity)
    return Head(record["policy"], arena_bytes, table)


def _step(record: dict[str, Any], fixed: TableSnapshot) -> Step:
    rows = len(fixed.layer)
    committed, desired = (_array(record, name, "i", (rows,)) for name in ("committed", "desired"))
    if not np.isin([committed, desired], fixed.widths).all():
        raise ValueError("a row has a width that is none")
    busy, since = _array(record, "busy", "b", (rows,)), _array(record, "since", "i", (rows,))
    table = fixed._replace(committed=committed, desired=desired, busy=busy, since=since)
    if record["verb"] not in VERBS:
        raise ValueError(f"its verb is {record['verb']!r:.80}")
    available = _signed(record["available_bytes"]) if record["verb"] == "raise" else 0
    return Step(
        record["verb"], table, _observation(record["observation"], fixed), available, _plan(record["plan"], rows)
    )


def _observation(seen: dict[str, Any], fixed: TableSnapshot) -> Observation:
    rows, layers, experts = len(fixed.layer), int(fixed.layer.max()) + 1, int(fixed.expert.max()) + 1
    shapes = {"mass": (layers, None), "routed": (layers,), "features": (rows, 3), "confidence": (rows,)}
    arrays = {name: _optional(seen, name, "f", shape) for name, shape in shapes.items()}
    if arrays["mass"] is not None and arrays["mass"].shape[1] < experts:
        raise ValueError("mass has too few experts")
    limits = dict(seen["limits"])
    limits["lowest_bits"] = _optional(limits, "lowest_bits", "i", (rows,))
    limits["damage"] = math.inf if limits["damage"] is None else _number(limits["damage"])
    for name in ("weight_bytes", "raise_bytes"):
        if limits[name] is not None:
            _check_whole(limits[name])
    _check_whole(limits["dwell_steps"])
    for name in ("threshold_blocks", "in_flight_bytes", "forecast_blocks"):
        _check_whole(seen[name])
    bounds = None if seen["rho_bounds"] is None else tuple(map(_number, seen["rho_bounds"]))
    if bounds is not None and len(bounds) != 2:
        raise ValueError("rho_bounds are not two numbers")
    kv = KVState(*map(_check_whole, seen["kv"]))
    return Observation(**{**seen, **arrays, "kv": kv, "limits": Limits(**limits), "rho_bounds": bounds})


def _plan(recorded: list[Any], rows: int) -> Plan:
    moves, damage, released, shortfall = recorded
    moves = tuple(Transition(*map(_check_whole, move)) for move in moves)
    if any(move.row >= rows for move in moves):
        raise ValueError("its plan moves a row that is none")
    return Plan(moves, _number(damage), _signed(released), _check_whole(shortfall))


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_NUMBER


def _check_whole(value: Any) -> int:
    if not _whole(value):
        raise ValueError(f"{value!r:.80} is no number of rows, bits, steps, blocks or bytes")
    return value


def _signed(value: Any) -> int:
    """A raising plan releases less than nothing."""
    return value if type(value) is int and _check_whole(abs(value)) >= 0 else _check_whole(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.80} is no number")
    return float(value)


def _optional(record: dict[str, Any], name: str, kind: str, shape: tuple[int | None, ...]) -> np.ndarray | None:
    return None if record[name] is None else _array(record, name, kind, shape)


def _array(
    record: dict[str, Any],
    name: str,
    kind: str,
    shape: tuple[int | None, ...],
    low: int = 0,
    high: int = LARGEST_NUMBER,
) -> np.ndarray:
    """An array of a kind (as numpy's dtype.kind) and shape (None: any length), integers from low to high."""
    array = unpack(record[name])
    fits = len(array.shape) == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True)
    )
    if array.dtype.kind != kind or not fits:
        raise ValueError(f"{name} is {array.dtype} {array.shape}")
    if kind == "i" and array.size and not low <= array.min() <= array.max() <= high:
        raise ValueError(f"{name} holds {array.min()} to {array.max()}")
    return array


def pack(array: np.ndarray | None) -> dict[str, object] | None:
    """An array as a trace's lines hold it."""
    if array is None:
        return None
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": content}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """What `pack` wrote; ValueError for anything but numbers."""
    # numpy reads more into a name than a type, as Python: what is no number's name is not shown to it.
    if not re.fullmatch("[<>|][bif][1248]", packed["dtype"]) or not all(_whole(length) for length in packed["shape"]):
        raise ValueError(f"an array of {packed['dtype']!r:.80} {packed['shape']!r:.80}")
    dtype = np.dtype(packed["dtype"])
    content = base64.b64decode(packed["base64"], validate=True)
    if len(content) != math.prod(packed["shape"]) * dtype.itemsize:
        raise ValueError(f"an array of {packed['shape']!r:.80} has {len(content)} bytes")
    return np.frombuffer(content, dtype=dtype).reshape(packed["shape"])
