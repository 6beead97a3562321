"""The paper's Figure 2 for trained models: how unevenly experts are used, and how much that depends on the text.

    python -m bench.routing_figure bench/results/quality-*.json --out docs/routing-mass

Reads the routing mass (Eq. 1) that bench/quality.py recorded, and writes a PNG and an SVG.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import write_figure

INK = "#333333"
COLOURS = ("#1b6ca8", "#e8862e", "#7a7a7a")
LARGEST_MULTIPLE = 3.0  # of an equal share, at the dark end of the map
LABEL_POINTS = 6  # of an expert's number: sixteen of them fit below their bars


def draw(records: list[dict[str, Any]]) -> Figure:
    """One column a model: a map of layers and experts above, its most uneven layer by text below."""
    figure = Figure(figsize=(4.2 * len(records), 6), dpi=120, layout="constrained")
    axes = figure.subplots(2, len(records), squeeze=False, height_ratios=(1.2, 1))
    for record, (above, below) in zip(records, axes.T, strict=True):
        mass = {text: np.array(layers) for text, layers in record["routing_mass"].items()}
        _map(above, mass["calibration"], record["settings"]["model"], figure)
        _bars(below, mass)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _map(axis: Axes, mass: np.ndarray, name: str, figure: Figure) -> None:
    """mass: (L, E) of calibration text; experts from the most to the least used in each layer."""
    times = -np.sort(-mass, axis=1) * mass.shape[1]
    image = axis.imshow(times, aspect="auto", cmap="Blues", vmin=0, vmax=LARGEST_MULTIPLE)
    axis.set_title(f"{name}: {times.min():.2f} to {times.max():.2f} equal shares", loc="left", fontsize=9, color=INK)
    axis.set_ylabel("layer")
    axis.set_yticks(np.arange(len(mass)))
    axis.set_xlabel("expert of each layer, most used first")
    figure.colorbar(image, ax=axis, label="routing mass, equal shares")


def _bars(axis: Axes, mass: dict[str, np.ndarray]) -> None:
    """The layer whose calibration mass is most uneven, by text, experts in calibration's order."""
    layer = int(mass["calibration"].std(1).argmax())
    order = np.argsort(-mass["calibration"][layer])
    width = 0.8 / len(mass)
    for at, (text, shares) in enumerate(mass.items()):
        places = np.arange(len(order)) + (at - (len(mass) - 1) / 2) * width
        axis.bar(places, shares[layer][order], width, label=text, color=COLOURS[at % len(COLOURS)])
    axis.axhline(1 / len(order), color=INK, linewidth=0.8, linestyle="--", label="equal share")
    axis.set_xticks(np.arange(len(order)), order, fontsize=LABEL_POINTS)
    axis.set_xlabel(f"expert of layer {layer}")
    axis.set_ylabel("routing mass")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    write_figure(__doc__, draw)
