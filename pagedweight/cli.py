"""The `pagedweight` command. Exit codes: 0 done, 2 bad input or a missing extra (one sentence on stderr)."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

import pagedweight

EXTRA_MODULES = {"hf": ("transformers",), "plots": ("matplotlib",)}
UNIT_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


def fail(message: str) -> typer.Exit:
    """Print one sentence on stderr; raise the result to leave with exit code 2."""
    typer.echo(f"pagedweight: {message}", err=True)
    return typer.Exit(2)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 9437184, 9MiB or 1.5GB; ValueError when it is not one."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in UNIT_BYTES:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * UNIT_BYTES[match[2].upper()])


def _size_option(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise fail(f"{option}: {error}") from error


def require_extras(*extras: str) -> None:
    """Leave with exit code 2 and the install command when an extra's packages are missing."""
    missing = [name for extra in extras for name in EXTRA_MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise fail(f"{' and '.join(missing)} not installed; run: pip install 'pagedweight[{','.join(extras)}]'")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedweight {pagedweight.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """MoE expert weights and the KV cache share one memory budget."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for timeline.png and demo.json.", file_okay=False)] = Path(
        "pagedweight-demo"
    ),
    tokens: Annotated[int, typer.Option(min=16, max=500, help="Tokens to generate.")] = 480,
    budget: Annotated[str, typer.Option(help="Bytes for weights and KV cache together, such as 9MiB.")] = "8.5MiB",
    windows: Annotated[int, typer.Option(min=1, max=3, help="Held-out windows of 512 tokens to read.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the sampled continuation.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Run the small model that ships with the package under a budget that its KV cache eats into."""
    require_extras("hf", "plots")
    budget_bytes = _size_option("--budget", budget)
    from pagedweight.demo.report import print_report, write_files
    from pagedweight.demo.run import DemoOptions, run_demo

    try:
        result = run_demo(DemoOptions(tokens=tokens, budget_bytes=budget_bytes, windows=windows, seed=seed))
    except ValueError as error:
        raise fail(str(error)) from error
    try:
        write_files(result, output)
    except OSError as error:
        raise fail(f"--output {output}: {error}") from error
    print_report(result, output, as_json)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `pagedweight` script."""
    app(arguments if arguments is not None else sys.argv[1:])
