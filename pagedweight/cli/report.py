"""`pagedweight report`: a run's trace as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedweight.cli.common import fail, require_extras

POINTS = 2000  # steps that a page shows apart; beyond, neighbours are drawn as one


def report(
    run: Annotated[Path, typer.Argument(help="File written with RuntimeConfig(trace_path=...).", dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.", dir_okay=False)] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Heading of the page; the trace's name if left out.")] = None,
) -> None:
    """Draw a run: memory, bits layer by layer and moves over time, as one HTML file that needs nothing else."""
    require_extras("plots")
    from pagedweight.cli.report_page import page
    from pagedweight.cli.report_run import read_run, thinned

    try:
        with run.open(encoding="utf-8") as lines:
            seen = read_run(lines)
        output.write_text(page(thinned(seen, POINTS), title or run.name), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        raise fail(f"{run}: {error}") from error
    typer.echo(f"{output}: {len(seen.step)} planner steps")
