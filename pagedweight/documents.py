"""JSON that may have come from anywhere, read without surprises."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

LARGEST_INTEGER = 2**63
MOST_BYTES = 100_000_000


def read_json(text: str | bytes, *, constants: bool = False) -> Any:
    """What JSON text holds.

    ValueError, saying why, for all that is not one plain document: also for a name that stands twice in an object, NaN
    and infinities, numbers beyond 64 bits, and nesting without end.
    constants: NaN and infinities are taken, as models' config.json may have them.
    """
    numbers = {} if constants else {"parse_constant": _no_number, "parse_float": _float}
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer, **numbers)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} stands twice in one object")
    return content


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -LARGEST_INTEGER <= int(digits) < LARGEST_INTEGER:
        raise ValueError(f"{digits[:40]} is too large a number")
    return int(digits)


def without_waiting(path: str, flags: int) -> int:
    """For open(): a pipe would have us wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_document(path: Path, *, constants: bool = False) -> Any:
    """What a JSON file holds, as read_json has it. ValueError, too, for what is no ordinary file of moderate size.

    OSError when it cannot be read.
    """
    with open(path, "rb", opener=without_waiting) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
            raise ValueError(f"it is no ordinary file of at most {MOST_BYTES} bytes")
        return read_json(file.read(), constants=constants)
