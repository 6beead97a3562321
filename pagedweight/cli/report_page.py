"""A run as one HTML file that needs nothing else: an interactive timeline, bits layer by layer, and sums."""

from __future__ import annotations

from html import escape
from string import Template

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pagedweight.cli.report_run import Run, totals_of

MIB = 2**20
FIGURE = "run"
# The same colours as the demo's picture; they stay apart in greyscale, on white and on black.
WEIGHTS, KV, FREE, RAISED = "#3a8bc9", "#e8862e", "#9aa3ad", "#4ac16d"
CONFIG = {"responsive": True, "displaylogo": False}
CLEAR = "rgba(0, 0, 0, 0)"
GRID = "rgba(128, 128, 128, 0.25)"
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #15181c; --line: #444; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.6rem; }
dl div { border: 1px solid var(--line); border-radius: 6px; padding: 0.4rem 0.8rem; }
dt { font-size: 0.8rem; opacity: 0.75; }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
</style>
</head>
<body>
<h1>$title</h1>
<dl>$sums</dl>
$figure
<p>$note</p>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const ink = () => Plotly.relayout("$name", {"font.color": dark.matches ? "#ddd" : "#222"});
dark.addEventListener("change", ink);
ink();
</script>
</body>
</html>
""")
NOTE = (
    "A step is one that the planner took: under pressure one a boundary, otherwise a few. Drag to zoom, double-click "
    "to see all again, click a name to hide its curve. Bits are those committed before a step's plan."
)


def page(run: Run, title: str) -> str:
    """The whole HTML document, plotly's own script included."""
    figure = draw(run).to_html(full_html=False, include_plotlyjs=True, div_id=FIGURE, config=CONFIG)
    sums = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in sums_of(run).items())
    return PAGE.substitute(title=escape(title), sums=sums, figure=figure, note=NOTE, name=FIGURE)


def sums_of(run: Run) -> dict[str, str]:
    totals = totals_of(run)
    return {
        "planner steps": f"{totals['planner_steps']:,}",
        "mean bits, lowest": f"{totals['lowest_mean_bits']:.2f} of {run.widths[-1]}",
        "mean bits, at the end": f"{totals['last_mean_bits']:.2f}",
        "released": f"{totals['released_bytes'] / MIB:,.1f} MiB in {totals['lowered']:,} moves",
        "loaded back": f"{totals['loaded_bytes'] / MIB:,.1f} MiB in {totals['raised']:,} moves",
        "largest shortfall": f"{totals['largest_shortfall_bytes'] / MIB:,.1f} MiB",
    }


def draw(run: Run) -> go.Figure:
    """Four panels over the same steps: memory, bits by layer, linear-blocks at each width, moves."""
    figure = make_subplots(
        rows=4,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.05,
        row_heights=[0.34, 0.26, 0.2, 0.2],
        subplot_titles=("memory, MiB", "mean bits of each layer", "linear-blocks at each width", "linear-blocks moved"),
    )
    _memory(figure, run)
    figure.add_trace(_layers(run), row=2, col=1)
    _widths(figure, run)
    for name, rows, colour in (("raised", run.raised, RAISED), ("lowered", -run.lowered, KV)):
        figure.add_trace(go.Bar(x=run.step, y=rows, name=name, marker_color=colour, marker_line_width=0), row=4, col=1)
    figure.update_layout(
        height=980,
        barmode="relative",
        bargap=0,
        hovermode="x unified",
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        modebar_bgcolor=CLEAR,
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
        legend={"tracegroupgap": 30},
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID)
    figure.update_xaxes(title_text="planner step", row=4, col=1)
    return figure


def _memory(figure: go.Figure, run: Run) -> None:
    """Stacked as they share the arena; side by side where the KV cache has memory of its own."""
    stack = {} if run.kv_bytes is None else {"stackgroup": "memory"}
    curves = [("expert weights", run.weight_bytes, WEIGHTS), ("KV cache", run.kv_bytes, KV)]
    for name, series, colour in (*curves, ("free KV blocks", run.free_bytes, FREE)):
        if series is not None:
            line = {"color": colour, "shape": "hv", "width": 1.5}
            figure.add_trace(go.Scatter(x=run.step, y=series / MIB, name=name, line=line, **stack), row=1, col=1)


def _layers(run: Run) -> go.Heatmap:
    return go.Heatmap(
        x=run.step,
        y=[f"layer {at}" for at in range(run.layer_bits.shape[1])],
        z=np.round(run.layer_bits.T, 3),
        zmin=run.widths[0],
        zmax=run.widths[-1],
        colorscale="Viridis",
        name="bits",
        colorbar={"title": "bits", "len": 0.26, "y": 0.57},
        hovertemplate="%{y}: %{z:.2f} bits<extra></extra>",
    )


def _widths(figure: go.Figure, run: Run) -> None:
    shades = [f"hsl(210, 60%, {int(75 - 50 * at / max(1, len(run.widths) - 1))}%)" for at in range(len(run.widths))]
    for at, (bits, shade) in enumerate(zip(run.widths, shades, strict=True)):
        line = {"width": 0, "color": shade, "shape": "hv"}
        curve = go.Scatter(
            x=run.step, y=run.rows_at_width[:, at], name=f"{bits} bits", stackgroup="rows", line=line, fillcolor=shade
        )
        figure.add_trace(curve, row=3, col=1)
