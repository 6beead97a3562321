"""`pagedweight demo`: the model that ships, under a budget that its KV cache eats into."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedweight.cli.common import fail, require_extras, size_option


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
