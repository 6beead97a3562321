"""The paper's Figure 5 for trained models: how far answers move against mean code bits, by policy.

    python -m bench.frontier_figure bench/results/policies-*-past.json --out docs/frontier

Reads what bench/policies.py wrote, and writes a PNG and an SVG.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import write_figure
from bench.policies_plans import FULL, UNIFORM
from bench.policies_report import window_kl
from bench.quality_parts import bootstrap, bootstrap_ratio

INK = "#333333"
RATIOS = (0.95, 1.3)  # of the closer policies; the others leave the panel at the top
# Colours stay apart in greyscale and for colour-blind eyes.
SHOWN = {
    FULL: ("#1b6ca8", "o", "-"),
    UNIFORM: ("#333333", "s", "--"),
    "static mixed": ("#e8862e", "^", "-"),
    "w/o page movement": ("#7fb2d9", "v", "-"),
    "dynamic pair": ("#8b5fa8", "D", ":"),
    "hotness tiers": ("#b8b03e", "x", "-"),
    "layer swap": ("#a8504b", "+", "-"),
}


def draw(records: list[dict[str, Any]]) -> Figure:
    """One column a model: KL above, and below how many times the full planner's KL each of the closer policies has."""
    figure = Figure(figsize=(4.6 * len(records), 6.4), dpi=120, layout="constrained")
    axes = figure.subplots(2, len(records), squeeze=False, sharex=True, height_ratios=(1.3, 1))
    for record, (above, below) in zip(records, axes.T, strict=True):
        _frontier(above, record)
        _ratios(below, record)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _frontier(axis: Axes, record: dict[str, Any]) -> None:
    budgets = record["settings"]["budgets"]
    for name, (colour, marker, line) in SHOWN.items():
        if name in record["cells"]:
            kl = [window_kl(record["cells"], name, bits) for bits in budgets]
            low, high = np.array([bootstrap(values) for values in kl]).T
            axis.plot(budgets, [values.mean() for values in kl], line, color=colour, marker=marker, ms=4, label=name)
            axis.fill_between(budgets, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_yscale("log")
    settings = record["settings"]
    axis.set_title(f"{settings['model']}, level {settings['method']}", loc="left", color=INK, fontsize="medium")
    axis.set_ylabel("KL to bf16, nats per token")
    axis.grid(axis="y", color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)


def _ratios(axis: Axes, record: dict[str, Any]) -> None:
    cells, budgets = record["cells"], record["settings"]["budgets"]
    for name, (colour, marker, line) in SHOWN.items():
        if name in cells:
            pairs = [(window_kl(cells, name, bits), window_kl(cells, FULL, bits)) for bits in budgets]
            low, high = np.array([bootstrap_ratio(*pair) for pair in pairs]).T
            axis.plot(
                budgets, [own.mean() / full.mean() for own, full in pairs], line, color=colour, marker=marker, ms=4
            )
            axis.fill_between(budgets, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_ylim(*RATIOS)
    axis.set_xlabel("mean code bits")
    axis.set_ylabel("KL, times the full planner's")
    axis.grid(axis="y", color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    write_figure(__doc__, draw)
