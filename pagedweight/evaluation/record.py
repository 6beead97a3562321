"""The JSON file of an evaluation: what it was run with, and one cell after another, written as each is done."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import pagedweight
from pagedweight.documents import read_document

PACKAGES = ("torch", "triton", "transformers", "numpy")


class Record:
    """settings: what the cells depend on. A file of the same settings is gone on with; ValueError for another's."""

    def __init__(self, path: Path, settings: dict[str, Any], device: str, program: str = "pagedweight") -> None:
        self.path = path
        facts = {"machine": machine(device), "versions": versions(), "command": command(program)}
        self.content: dict[str, Any] = {"settings": settings, **facts, "cells": {}}
        if path.exists():
            self.content = self._resumed(_earlier(path), settings) | facts

    def has(self, *names: str, part: str = "cells") -> bool:
        at = self.content.get(part, {})
        for name in names:
            if name not in at:
                return False
            at = at[name]
        return True

    def put(self, cell: dict[str, Any], *names: str, part: str = "cells") -> None:
        """A cell under its method, budget and task, on disk when this returns."""
        at = self.content.setdefault(part, {})
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = cell
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(self.content) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def _resumed(self, old: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        differing = [name for name in settings if old["settings"].get(name) != settings[name]]
        if differing:
            raise ValueError(
                f"{self.path} was measured with other settings ({', '.join(differing)}); write to another file, or "
                "remove it"
            )
        return old


def _earlier(path: Path) -> dict[str, Any]:
    """What an earlier run has left. ValueError for a file of any other kind, OSError for a folder."""
    try:
        content = read_document(path, constants=True)
    except ValueError as error:
        raise ValueError(f"{path} is no record ({error}); write to another file, or remove it") from error
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        raise ValueError(f"{path} is no record of an earlier run; write to another file, or remove it")
    return content


def machine(device: str) -> dict[str, str | int]:
    """What a figure was measured on."""
    on = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    return {"device": on, "system": platform.system(), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "pagedweight": pagedweight.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command(program: str) -> str:
    """The command line, without the folders of absolute paths."""
    words = []
    for word in sys.argv[1:]:
        name, separator, path = word.rpartition("=")
        words.append(name + separator + Path(path).name if Path(path).is_absolute() else word)
    return f"{program} {shlex.join(words)}"
