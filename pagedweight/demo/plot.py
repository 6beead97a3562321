"""The demo's picture: what the budget holds over time, and the mean bits that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pagedweight.demo.timeline import Phase, Sample

MIB = 2**20
LAYERS = (  # from the bottom of the stack up; colours stay apart in greyscale and for colour-blind eyes
    ("planes", "expert planes", "#1b6ca8"),
    ("tables", "expert tables", "#7fb2d9"),
    ("kv", "KV cache", "#e8862e"),
    ("free", "free", "#eeeeee"),
)
INK = "#333333"


def draw_timeline(samples: Sequence[Sample], budget_bytes: int, paths: Sequence[Path]) -> None:
    """Write a PNG, an SVG or both: stacked bytes of planes, tables, KV cache and free memory above, mean bits below,
    and bytes on their way. On white, so that they read on dark pages too."""
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    figure.patch.set_facecolor("white")
    upper, lower, moving = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.3, 0.8))
    steps = [s.step for s in samples]
    stack = [[getattr(s, f"{name}_bytes") / MIB for s in samples] for name, _, _ in LAYERS]
    upper.stackplot(
        steps, stack, labels=[label for _, label, _ in LAYERS], colors=[colour for *_, colour in LAYERS], step="post"
    )
    upper.axhline(budget_bytes / MIB, color=INK, linewidth=1, linestyle="--", label="budget")
    upper.set_ylabel("MiB")
    upper.set_ylim(0, budget_bytes / MIB * 1.12)
    upper.set_title("One budget: expert weights give memory to the KV cache and take it back", loc="left", color=INK)
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    lower.step(steps, [s.mean_bits for s in samples], where="post", color="#1b6ca8", linewidth=1.8)
    lower.set_ylabel("mean bits")
    moving.bar(steps, [s.moving_bytes / MIB for s in samples], width=1.0, color="#6b8e4e")
    moving.set_ylabel("moving, MiB")
    moving.set_xlabel("step: a forward, or a boundary between two while idle")
    lower.set_ylim(min(s.mean_bits for s in samples) - 0.4, max(s.mean_bits for s in samples) + 0.4)
    lower.yaxis.set_major_locator(MaxNLocator(nbins=5))
    lower.grid(axis="y", color="#dddddd")
    for axis in (upper, lower, moving):
        axis.set_xlim(steps[0], steps[-1])
        axis.spines[["top", "right"]].set_visible(False)
        _mark_phases(axis, samples, named=axis is upper)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _mark_phases(axis: Axes, samples: Sequence[Sample], named: bool) -> None:
    """A thin line where a phase begins, with its name beside it on the upper panel."""
    previous: Phase | None = None
    for sample in samples:
        if sample.phase == previous:
            continue
        previous = sample.phase
        axis.axvline(sample.step, color=INK, linewidth=0.8, linestyle=":")
        if named:
            at = (sample.step, axis.get_ylim()[1])
            axis.annotate(
                f" {sample.phase.value}",
                at,
                xytext=(0, -4),
                textcoords="offset points",
                va="top",
                fontsize=9,
                color=INK,
            )
