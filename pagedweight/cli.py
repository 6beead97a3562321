"""The `pagedweight` command; EXIT_CODES says how it leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import pagedweight
from pagedweight.cli_bench import bench
from pagedweight.cli_common import fail, require_extras, size_option
from pagedweight.cli_doctor import doctor
from pagedweight.cli_eval import evaluate
from pagedweight.cli_inspect import inspect
from pagedweight.cli_plan import plan, replay
from pagedweight.cli_quantize import calibrate, convert, quantize
from pagedweight.cli_report import report
from pagedweight.cli_serve import serve
from pagedweight.cli_top import top

EXIT_CODES = (
    "Exit codes: 0 done; 1 done, and the answer is no (doctor, replay); 2 bad input or a missing extra, in one "
    "sentence on stderr; 130 interrupted."
)

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedweight {pagedweight.__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """MoE expert weights and the KV cache share one memory budget."""


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Folder for timeline.png, timeline.svg and demo.json.", file_okay=False)
    ] = Path("pagedweight-demo"),
    tokens: Annotated[int, typer.Option(min=16, max=500, help="Tokens to generate.")] = 480,
    budget: Annotated[str, typer.Option(help="Bytes for weights and KV cache together, such as 9MiB.")] = "8.5MiB",
    windows: Annotated[int, typer.Option(min=1, max=3, help="Held-out windows of 512 tokens to read.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the sampled continuation.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Write planner steps here, for pagedweight report and replay.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Run the small model that ships with the package under a budget that its KV cache eats into."""
    require_extras("hf", "plots")
    budget_bytes = size_option("--budget", budget)
    from pagedweight.demo.report import print_report, write_files
    from pagedweight.demo.run import DemoOptions, run_demo

    trace_path = None if trace is None else str(trace)
    options = DemoOptions(tokens=tokens, budget_bytes=budget_bytes, windows=windows, seed=seed, trace_path=trace_path)
    try:
        result = run_demo(options)
    except (ValueError, OSError) as error:
        raise fail(str(error)) from error
    try:
        write_files(result, output)
    except OSError as error:
        raise fail(f"--output {output}: {error}") from error
    print_report(result, output, as_json)


app.command()(quantize)
app.command()(calibrate)
app.command()(convert)
app.command()(plan)
app.command()(replay)
app.command()(doctor)
app.command()(inspect)
app.command()(report)
app.command()(bench)
app.command()(serve)
app.command()(top)
app.command("eval")(evaluate)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `pagedweight` script."""
    app(arguments if arguments is not None else sys.argv[1:])
