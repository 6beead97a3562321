"""Heat maps on a terminal: a cell of colour for each value, or of ink where the terminal has no colour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

SHADES = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")  # viridis
INKS = "·:-=+*#@"
BESIDE = 40  # columns that a row of cells leaves for what stands beside it


def cells(values: Sequence[float], ends: tuple[float, float], console: Console, wide: int = 2) -> Text:
    """A row of cells from the low end to the high one; the largest of a few in each where not all values fit.

    wide: columns of a cell, where there is room for them.
    """
    room = max(8, console.width - BESIDE)
    each = -(-len(values) // room)
    wide = wide if wide * len(values) <= room else 1
    line = Text()
    for start in range(0, len(values), each):
        line.append_text(_cell(_level(max(values[start : start + each]), ends), wide, console))
    return line


def legend(ends: tuple[float, float], console: Console) -> Text:
    """Every shade once, between the values that the first and the last stand for."""
    line = Text(f"{ends[0]:.3g} ")
    for level in range(len(SHADES)):
        line.append_text(_cell(level, 2, console))
    return line.append(f" {ends[1]:.3g}")


def _level(value: float, ends: tuple[float, float]) -> int:
    low, high = ends
    share = (value - low) / (high - low) if high > low else 1.0
    return round(min(max(share, 0.0), 1.0) * (len(SHADES) - 1))


def _cell(level: int, wide: int, console: Console) -> Text:
    if console.color_system is None:
        return Text(INKS[level] * wide)
    return Text(" " * wide, style=f"on {SHADES[level]}")


def save_picture(console: Console, path: Path, title: str) -> None:
    """What a recording console has printed, as an SVG that asks the network for nothing. OSError when it cannot be."""
    fetched = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)  # rich would have fonts loaded from elsewhere
    path.write_text(fetched.sub("", console.export_svg(title=title)), encoding="utf-8")
