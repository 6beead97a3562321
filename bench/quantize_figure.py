"""Memory of the quantizer over time, on the device and on the host, in a layer's bf16 bytes.

    python -m bench.quantize_figure bench/results/h200-quantize*.json --out docs/quantize-memory

Reads what bench/quantize.py recorded, and writes a PNG and an SVG.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import write_figure

INK = "#333333"
COLOURS = {"device": "#1b6ca8", "host": "#e8862e"}
LIMIT_LAYERS = 3.0  # what the device may hold at most


def draw(records: list[dict[str, Any]]) -> Figure:
    """One panel a measured row."""
    rows = [row for record in records for row in record["rows"]]
    figure = Figure(figsize=(4.2 * len(rows), 3.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(rows), squeeze=False)[0]
    for row, axis in zip(rows, axes, strict=True):
        _curves(axis, row)
    axes[0].set_ylabel("bytes, layers in bf16")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _curves(axis: Axes, row: dict[str, Any]) -> None:
    seconds = row["memory"]["seconds"]
    for where, colour in COLOURS.items():
        values = np.array(row["memory"][f"{where}_bytes"]) / row["layer_bytes"]
        axis.plot(seconds, values, color=colour, linewidth=1, label=where)
    axis.axhline(LIMIT_LAYERS, color=INK, linewidth=0.8, linestyle="--", label="limit on the device")
    layers = row.get("measured_layers", row["layers"])
    name = row.get("model") or "a folder of drawn layers"
    axis.set_title(f"{name}, {row['level']}, {layers} layers", loc="left", fontsize=9, color=INK)
    axis.set_xlabel("seconds")
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    write_figure(__doc__, draw)
