"""The `pagedweight` command; EXIT_CODES says how it leaves."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import pagedweight
from pagedweight.cli.bench import bench
from pagedweight.cli.common import OneSentence
from pagedweight.cli.demo import demo
from pagedweight.cli.doctor import doctor
from pagedweight.cli.eval import evaluate
from pagedweight.cli.inspect import inspect
from pagedweight.cli.plan import plan, replay
from pagedweight.cli.quantize import calibrate, convert, quantize
from pagedweight.cli.report import report
from pagedweight.cli.serve import serve
from pagedweight.cli.top import top

EXIT_CODES = (
    "Exit codes: 0 done; 1 done, and the answer is no (doctor, replay); 2 bad input or a missing extra, in one "
    "sentence on stderr; 130 interrupted."
)

app = typer.Typer(cls=OneSentence, add_completion=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedweight {pagedweight.__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES, invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """MoE expert weights and the KV cache share one memory budget."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(demo)
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
