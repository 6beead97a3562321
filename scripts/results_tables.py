"""Pieces of the results page that its sections share: a table, and the command under it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Lines = Iterator[str]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Lines:
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""


def made_by(record: Mapping[str, Any], on: str) -> Lines:
    yield f"`{record['command']}`, {on}"
    yield ""
