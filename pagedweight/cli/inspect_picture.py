"""The picture of `pagedweight inspect`: sensitivity of every linear-block, and routing mass of every expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from pagedweight.layout import Projection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pagedweight.cli.inspect_facts import Facts

INK = "#333333"
LARGEST_SHARE = 3.0  # of an equal share, at the dark end of the map


def draw_sensitivity(facts: Facts) -> Figure:
    """Maps of layers by experts, on white so that they read on dark pages too: s_i^b at the floor width of both
    projections, and the routing mass that weighs them. Experts are in the model's order."""
    figure = Figure(figsize=(10, 2.2 + 2.1 * min(len(facts.layers), 48) / 8), dpi=120, layout="constrained")
    figure.patch.set_facecolor("white")
    axes = figure.subplots(1, 3)
    floor = [grid([layer.sensitivity[:, p, 0] for layer in facts.layers]) for p in Projection]
    scale = _scale(floor)
    for axis, projection, values in zip(axes, Projection, floor, strict=False):
        image = axis.imshow(values, aspect="auto", cmap="viridis", norm=scale)
        axis.set_title(f"{projection.label} at {facts.layout.floor_width} bits", loc="left", fontsize=10, color=INK)
    figure.colorbar(image, ax=list(axes[:2]), label="sensitivity")
    shares = grid([layer.shares for layer in facts.layers])
    image = axes[2].imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=LARGEST_SHARE)
    title = "routing mass" if facts.calibrated else "routing mass: not calibrated"
    axes[2].set_title(title, loc="left", fontsize=10, color=INK)
    figure.colorbar(image, ax=axes[2], label="equal shares")
    for axis in axes:
        _label(axis, facts)
    return figure


def grid(rows: list[np.ndarray]) -> np.ndarray:
    """(L, E) of layers that may differ in their experts; NaN where a layer has none."""
    filled = np.full((len(rows), max(map(len, rows))), np.nan)
    for at, row in enumerate(rows):
        filled[at, : len(row)] = row
    return filled


def _scale(values: list[np.ndarray]) -> Normalize:
    """Logarithmic where values span more than a decade; all zero or narrower: linear."""
    low, high = min(map(np.nanmin, values)), max(map(np.nanmax, values))
    positive = [v[v > 0] for v in values]
    if high > 0 and high > 10 * low:
        return LogNorm(min(v.min() for v in positive if v.size), high)
    return Normalize(low, high)


def _label(axis: Axes, facts: Facts) -> None:
    numbers = [layer.shape.layer for layer in facts.layers]
    each = -(-len(numbers) // 16)
    axis.set_yticks(range(0, len(numbers), each), numbers[::each])
    axis.set_xlabel("expert")
    axis.set_ylabel("layer")
