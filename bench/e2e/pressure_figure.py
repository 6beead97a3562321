"""Widths, bytes and speed while a KV cache takes the weights' bytes and gives them back, from recorded runs.

    python -m bench.e2e.pressure_figure bench/results/h200-pressure-*.json --out docs/pressure

Reads what bench/e2e/gpu_pressure.py wrote, and writes a PNG and an SVG.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, WEIGHTS, CACHE, MARK = "#333333", "#1b6ca8", "#e8862e", "#999999"


def draw(records: dict[str, dict[str, Any]]) -> Figure:
    """One column a run: mean bits, who holds the budget, tokens/s."""
    figure = Figure(figsize=(5.2 * len(records), 6.6), dpi=120, layout="constrained")
    axes = figure.subplots(3, len(records), squeeze=False, sharex="col")
    for (name, record), (bits, held, speed) in zip(records.items(), axes.T, strict=True):
        _run(record["moving"], record["budget_bytes"] / 2**30, bits, held, speed)
        bits.set_title(name, loc="left", color=INK)
    for axis, label in zip(axes[:, 0], ("mean bits", "GiB of the budget", "tokens/s of each sequence"), strict=True):
        axis.set_ylabel(label)
    for axis in axes[2]:
        axis.set_xlabel("steps")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _run(moving: dict[str, Any], budget_gib: float, bits: Axes, held: Axes, speed: Axes) -> None:
    """The batch that fills the cache, a line where its sequences end, and the small one that decodes on."""
    parts = [(moving["over_time"], 0, moving["batch"]), (moving["restoring"], moving["steps"], moving["restore_batch"])]
    for rows, first, batch in parts:
        steps = [first + row["step"] for row in rows]
        named = {"label": None} if first else {}
        bits.plot(steps, [row["bits"] for row in rows], color=INK)
        held.plot(steps, [row["weight_mib"] / 1024 for row in rows], color=WEIGHTS, **({"label": "weights"} | named))
        held.plot(steps, [row["kv_mib"] / 1024 for row in rows], color=CACHE, **({"label": "KV cache"} | named))
        speed.plot(steps, [row["tokens_per_second"] / batch for row in rows], color=INK)
    held.axhline(budget_gib, color=MARK, linestyle="--", label="budget")
    for axis in (bits, held, speed):
        axis.axvline(moving["steps"], color=MARK, linewidth=0.8)
        axis.grid(axis="y", color="#dddddd")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="without a suffix")
    options = parser.parse_args()
    records = {path.stem.removeprefix("h200-pressure-"): json.loads(path.read_text()) for path in options.records}
    figure = draw(records)
    for suffix in ("png", "svg"):
        figure.savefig(options.out.with_suffix(f".{suffix}"), metadata={"Date": None} if suffix == "svg" else None)


if __name__ == "__main__":
    main()
