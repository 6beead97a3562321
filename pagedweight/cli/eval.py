"""`pagedweight eval`: what a quantized model loses at budgets, by method and task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedweight.cli.common import device_option, fail, model_option, parse_bytes, require_extras

if TYPE_CHECKING:
    from pagedweight.evaluation.methods import Budget
    from pagedweight.evaluation.run import Plan


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that quantize wrote.", file_okay=False)],
    task: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE: text, or records of GSM8K, MATH or LongBench. Repeatable.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The unquantized model; by default the parent width stands in.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="How widths are chosen within a budget. Repeatable; --methods lists them.")
    ] = None,
    methods: Annotated[bool, typer.Option("--methods", help="List the methods and leave.")] = False,
    budget: Annotated[
        list[str] | None, typer.Option(help="Mean bits, such as 3.25, or bytes, such as 10GiB. Repeatable.")
    ] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a window, or of prompt and answer, at most.")] = 512,
    count: Annotated[int, typer.Option(min=1, help="Windows or records of each task, at most.")] = 32,
    rows: Annotated[int, typer.Option(min=1, help="Of them in one forward.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the choice among records.")] = 0,
    harness: Annotated[
        list[str] | None, typer.Option(help="Task of lm-evaluation-harness, at each budget. Repeatable.")
    ] = None,
    harness_folder: Annotated[
        Path | None, typer.Option(help="Folder of task files of your own.", exists=True, file_okay=False)
    ] = None,
    harness_limit: Annotated[int | None, typer.Option(min=1, help="Items of each harness task, at most.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to work; the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of both models; fp32 on a CPU, else the model's own.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file; the same command goes on where it was stopped.")] = Path(
        "evaluation.json"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Measure perplexity, gold answers and divergence from the unquantized model at budgets."""
    require_extras("hf", *(["eval"] if harness else []))
    from pagedweight.evaluation.items import Size
    from pagedweight.evaluation.methods import DEFAULT_METHODS, METHODS
    from pagedweight.evaluation.run import Plan

    if methods:
        typer.echo("\n".join(METHODS))
        raise typer.Exit
    if not task and not harness:
        raise fail("nothing to measure; give --task NAME=FILE or --harness TASK")
    plan = Plan(
        checkpoint,
        dict(_named_file(one) for one in task or ()),
        tuple(method or DEFAULT_METHODS),
        tuple(_budget(one) for one in budget or ("3", "4")),
        model_option("--reference", reference),
        Size(length, count, seed),
        rows,
        device_option(device),
        dtype,
    )
    content = _run(plan, out, harness or [], {"folder": harness_folder, "limit": harness_limit})
    _print(content, out, as_json)


def _run(plan: Plan, out: Path, harness: list[str], options: dict[str, Any]) -> dict[str, Any]:
    from pagedweight.checkpoint import Checkpoint
    from pagedweight.cli.bars import bars
    from pagedweight.demo.run import quiet_transformers
    from pagedweight.evaluation.run import evaluate as run
    from pagedweight.evaluation.run import evaluate_harness

    try:
        Checkpoint.open(plan.checkpoint)  # before transformers looks for a model of that name
        with quiet_transformers(), bars() as progress:
            content = run(plan, out, progress) if plan.tasks else {}
            return evaluate_harness(plan, out, harness, progress, **options) if harness else content
    except (ValueError, OSError) as error:
        raise fail(" ".join(str(error).split())) from error


def _named_file(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise fail(f"--task {text}: write NAME=FILE")
    return name, Path(path)


def _budget(text: str) -> Budget:
    from pagedweight.evaluation.methods import Budget

    try:
        bits = float(text)
    except ValueError:
        try:
            return Budget(text, None, parse_bytes(text))
        except ValueError as error:
            raise fail(f"--budget {error}; or a mean of bits such as 3.25") from error
    if not 1 <= bits <= 16:
        raise fail(f"--budget {text}: a mean of bits is between 1 and 16; bytes have a unit, such as {text}MiB")
    return Budget(text, bits, None)


def _print(content: dict[str, Any], out: Path, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from pagedweight.evaluation.report import cells, rows

    found = rows(content)
    if as_json:
        typer.echo(json.dumps({"file": str(out), "rows": found, "harness": content.get("harness", {})}))
        return
    table = Table(
        title=str(out),
        caption="loss: perplexity of a text, nats a token of gold answers; KL in 10^-3 nats; top: equal tokens",
    )
    for name in ("method", "budget", "bits", "MiB", "task", "loss", "KL", "top"):
        table.add_column(name, justify="left" if name in ("method", "task") else "right", no_wrap=True)
    for row in found:
        bits, held = row["bits"], row["weight_bytes"]
        sizes = ("" if bits is None else f"{bits:.2f}", "" if held is None else f"{held / 2**20:.1f}")
        for at, (name, task) in enumerate(row["tasks"].items()):
            own = (row["method"], row["budget"], *sizes) if at == 0 else ("", "", "", "")
            table.add_row(*own, name, *cells(task))
    console = Console(markup=False)
    console.print(table)
    for name, scores in content.get("harness", {}).items():
        console.print(f"{name}: {scores}", highlight=False, soft_wrap=True)
