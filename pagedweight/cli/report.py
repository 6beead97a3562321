"""`pagedweight report`: a run's trace as a page to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pagedweight.cli.common import TRACE_FAULTS, fail, require_extras, trace_fault

POINTS = 2000  # steps that a page shows apart; beyond, neighbours are drawn as one


def report(
    run: Annotated[Path, typer.Argument(help="File written with RuntimeConfig(trace_path=...).", dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.", dir_okay=False)] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Heading of the page; the trace's name if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the run comes to as one JSON object.")] = False,
) -> None:
    """Draw a run: memory, bits layer by layer and moves over time, as one HTML file that needs nothing else."""
    require_extras("plots")
    from pagedweight.cli.bars import bars, read_lines
    from pagedweight.cli.report_page import page
    from pagedweight.cli.report_run import read_run, thinned, totals_of

    try:
        with bars() as progress:
            seen = read_run(read_lines(run, progress))
    except TRACE_FAULTS as error:
        raise fail(f"{run}: {trace_fault(error)}") from error
    try:
        output.write_text(page(thinned(seen, POINTS), title or run.name), encoding="utf-8")
    except OSError as error:
        raise fail(f"--output {output}: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps({"output": str(output), **totals_of(seen)}))
    else:
        typer.echo(f"{output}: {len(seen.step)} planner steps")
