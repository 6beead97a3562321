"""A model's config chooses no code: attention or experts that it names by a repository of the Hub are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def refuse_named_code(config: Mapping[str, Any], where: str | Path) -> None:
    """ValueError when a config.json names, at any depth, an implementation that lies on the Hub.

    Where the package `kernels` is installed, transformers would download and run it, whatever trust_remote_code says.
    """
    for name, value in _entries(config):
        if "_implementation" in name and isinstance(value, str) and "/" in value:
            raise ValueError(
                f"{where} has {name} {value[:100]!r}, code of the Hub, which no file may choose; remove the entry and, "
                "if you trust that code, name it when you load the model"
            )


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a document, those within a value under its name too: a choice may be one for each part."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{own}" if name else str(own), inner) for own, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(name, inner) for inner in value]
        else:
            yield name, value
