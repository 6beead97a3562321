"""The record of a fuzzing script: an entry for each piece that has run, and their sums by state of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis

from pagedweight.evaluation.record import command, machine, versions

ROOT = Path(__file__).parents[1]
SUMMED = ("steps", "cases", "read", "refused", "seconds", "findings")


def add_piece(path: Path, script: str, piece: dict[str, Any]) -> None:
    """Pieces may end at the same time: they take turns at the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        pieces = json.loads(file.read() or '{"pieces": []}')["pieces"]
        pieces.append({"command": command(script), "sources": sources(), **piece})
        facts = {"machine": machine("cpu"), "versions": versions() | {"hypothesis": hypothesis.__version__}}
        file.truncate(0)
        file.write(json.dumps({**facts, "sums": sums(pieces), "pieces": pieces}, indent=1) + "\n")


def sums(pieces: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By state of the sources, in the order in which they came."""
    found: dict[str, Counter[str]] = {}
    for piece in pieces:
        counted = {name: piece[name] for name in SUMMED if name in piece}
        found.setdefault(piece["sources"], Counter()).update({"pieces": 1, **counted})
    return {state: dict(counted) for state, counted in found.items()}


def sources() -> str:
    """Of every file of this repository that this process has imported: pieces of one state ran the same code."""
    files = {Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_relative_to(ROOT)):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
