"""What the figure benches share: records in, a PNG and an SVG out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def write_figure(description: str, draw: Callable[[list[dict[str, Any]]], Figure]) -> None:
    """The command line of a figure; draw: of the records that it names."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    arguments = parser.parse_args()
    figure = draw([json.loads(path.read_text(encoding="utf-8")) for path in arguments.records])
    for suffix in (".png", ".svg"):
        figure.savefig(arguments.out.with_suffix(suffix))
