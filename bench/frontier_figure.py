"""The paper's Figure 5 for trained models: how far answers move against mean code bits, by policy.

    python -m bench.frontier_figure bench/results/policies-*-past.json --out docs/frontier

Reads what bench/policies.py wrote, and writes a PNG and an SVG.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.policies_plans import FULL, UNIFORM
from bench.policies_report import window_kl
from bench.quality_parts import bootstrap

INK = "#333333"
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
    figure = Figure(figsize=(4.6 * len(records), 4.4), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(records), squeeze=False)[0]
    for axis, record in zip(axes, records, strict=True):
        _frontier(axis, record)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
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
    axis.set_title(record["settings"]["model"], loc="left", color=INK)
    axis.set_xlabel("mean code bits")
    axis.set_ylabel("KL to the unquantized model, nats per token")
    axis.grid(axis="y", color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    arguments = parser.parse_args()
    figure = draw([json.loads(path.read_text(encoding="utf-8")) for path in arguments.records])
    for suffix in (".png", ".svg"):
        figure.savefig(arguments.out.with_suffix(suffix))


if __name__ == "__main__":
    main()
