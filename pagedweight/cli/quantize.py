"""`pagedweight quantize`, `calibrate` and `convert`: a model to pages, pages to a policy, tables to other codebooks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedweight.cli.common import device_option, fail, model_option, require_extras

if TYPE_CHECKING:
    from pagedweight.layout import Layout

DataOption = Annotated[
    list[Path] | None, typer.Option("--data", help="Calibration text: .jsonl with a text field, or plain. Repeatable.")
]
WindowsOption = Annotated[int, typer.Option(min=1, help="Windows of 512 tokens to use at most.")]
SeedOption = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def quantize(
    model: Annotated[str, typer.Argument(help="Folder of a dense model, or its name on the Hub.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.", file_okay=False)],
    level: Annotated[
        str, typer.Option(help="fast, balanced or best; the last two need --data or --statistics.")
    ] = "fast",
    widths: Annotated[str, typer.Option(help="Supported bitwidths; the largest is stored.")] = "2,3,4,5,6",
    codebook: Annotated[list[str] | None, typer.Option(help="Table of a width, as WIDTH=NAME. Repeatable.")] = None,
    data: DataOption = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Statistics of this model from an earlier run.", file_okay=False)
    ] = None,
    keep_statistics: Annotated[
        Path | None, typer.Option(help="Folder to keep the statistics taken from --data in.", file_okay=False)
    ] = None,
    windows: WindowsOption = 1024,
    seed: SeedOption = 0,
    device: Annotated[str | None, typer.Option(help="Where to work; the GPU if there is one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model's routed experts as pages. A killed run of the same command goes on where it stopped."""
    require_extras("hf")
    chosen, codebooks = _widths(widths), _codebooks(codebook or [])
    if data and statistics:
        raise fail("--data and --statistics exclude each other; statistics were taken from a text already")
    if keep_statistics and not data:
        raise fail("--keep-statistics keeps what --data gives; add --data")
    device = device_option(device)
    from pagedweight.calibration.stored import load_statistics
    from pagedweight.cli.bars import bars, noted_warnings
    from pagedweight.quantizing import quantize as run

    began = time.monotonic()
    try:
        calibration: Any = list(data) if data else None
        if statistics:
            calibration = load_statistics(statistics)
        with noted_warnings() as notes, bars() as progress:
            folder = run(
                model,
                out,
                level=level,
                widths=chosen,
                codebooks=codebooks,
                calibration=calibration,
                windows=windows,
                seed=seed,
                device=device,
                keep_statistics=keep_statistics,
                progress=progress,
            )
    except (ValueError, OSError) as error:
        raise fail(" ".join(str(error).split())) from error
    _print(_quantized(folder, level, notes, time.monotonic() - began), as_json)


def calibrate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that quantize wrote.", file_okay=False)],
    data: DataOption = None,
    model: Annotated[
        str | None, typer.Option(help="The unquantized model; by default the parent width stands in.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Statistics of the model from an earlier run.", file_okay=False)
    ] = None,
    method: Annotated[str, typer.Option(help="gradient, or forward where a backward pass does not fit.")] = "gradient",
    heads: Annotated[str, typer.Option(help="Residual heads: paper, centered, or better of the two.")] = "better",
    windows: WindowsOption = 128,
    device: Annotated[str | None, typer.Option(help="Where to work; the GPU if there is one.")] = None,
    search_windows: Annotated[int, typer.Option(min=0, help="Windows for the policy search; 0 leaves it out.")] = 6,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure a quantized model on text and write the planner's policy beside its pages."""
    require_extras("hf")
    if not data:
        raise fail("calibrate needs text; give --data FILE")
    device = device_option(device)
    from pagedweight.calibration.pipeline import Options
    from pagedweight.calibration.pipeline import calibrate as run
    from pagedweight.cli.bars import bars, noted_warnings

    began = time.monotonic()
    options = Options(method=method, heads=heads, search_windows=search_windows, seed=seed)
    try:
        with noted_warnings() as notes, bars() as progress:
            run(
                checkpoint,
                list(data),
                model=model_option("--model", model),
                statistics=statistics,
                windows=windows,
                device=device,
                options=options,
                progress=progress,
            )
    except (ValueError, OSError) as error:
        raise fail(" ".join(str(error).split())) from error
    _print(_calibrated(checkpoint, notes, time.monotonic() - began), as_json)


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that quantize wrote.", file_okay=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write.", file_okay=False)],
    codebook: Annotated[list[str], typer.Option(help="A width to convert, as WIDTH=lut16. Repeatable.")],
    as_json: JsonOption = False,
) -> None:
    """Write a quantized folder again with 16-bit tables at some widths; every value stays what it is."""
    from pagedweight.cli.bars import bars
    from pagedweight.saving_convert import convert as run

    began = time.monotonic()
    try:
        with bars() as progress:
            folder = run(checkpoint, out, _codebooks(codebook), progress=progress)
    except (ValueError, OSError) as error:
        raise fail(" ".join(str(error).split())) from error
    _print(_converted(folder, time.monotonic() - began), as_json)


def _widths(text: str) -> tuple[int, ...]:
    from pagedweight.layout import normalized_widths

    try:
        return normalized_widths(tuple(int(part) for part in text.split(",")))
    except ValueError as error:
        raise fail(f"--widths {text}: {error}") from error


def _codebooks(pairs: list[str]) -> dict[int, str]:
    chosen = {}
    for pair in pairs:
        width, separator, name = pair.partition("=")
        if not separator or not width.isdigit():
            raise fail(f"--codebook {pair}: write WIDTH=NAME, such as 6=cubic")
        chosen[int(width)] = name
    return chosen


def _quantized(folder: Path, level: str, notes: list[str], seconds: float) -> dict[str, object]:
    from pagedweight.checkpoint import Checkpoint

    layout = Checkpoint.open(folder).layout
    return {
        "folder": str(folder),
        "level": level,
        "linear_blocks": layout.rows,
        "layers": len(layout.moe_layers),
        "weights": layout.weights(),
        "bytes_by_width": bytes_by_width(layout),
        "warnings": notes,
        "seconds": round(seconds, 1),
    }


def _converted(folder: Path, seconds: float) -> dict[str, object]:
    from pagedweight.checkpoint import Checkpoint

    layout = Checkpoint.open(folder).layout
    return {
        "folder": str(folder),
        "codebooks": dict(layout.codebooks),
        "bytes_by_width": bytes_by_width(layout),
        "warnings": [],
        "seconds": round(seconds, 1),
    }


def bytes_by_width(layout: Layout) -> dict[int, int]:
    """Bytes of every linear-block's planes and table at each width, as they lie in the files."""
    from pagedweight.bitplane import plane_words
    from pagedweight.layout import table_bytes

    shapes = layout.row_shapes()
    return {
        bits: sum(4 * bits * n * plane_words(k) + table_bytes(layout.codebooks[bits], n, bits) for n, k in shapes)
        for bits in layout.widths
    }


def _calibrated(checkpoint: Path, notes: list[str], seconds: float) -> dict[str, object]:
    from pagedweight.calibration.pipeline import REPORT
    from pagedweight.checkpoint import FOLDER

    report = json.loads((checkpoint / FOLDER / REPORT).read_text(encoding="utf-8"))
    trials = report["trials"]
    return {
        "folder": str(checkpoint / FOLDER),
        "tokens": report["tokens"],
        "sequences": report["sequences"],
        "skipped_documents": report["skipped_documents"],
        "cold_linear_blocks": len(report["cold"]),
        "residual_heads": report["residual_heads"],
        "trials": len(trials),
        "divergence_beside_first_policy": min((t["score"] for t in trials if t["kept"]), default=None),
        "warnings": notes,
        "seconds": round(seconds, 1),
    }


def _print(summary: dict[str, object], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
        return
    for name, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} bits: {v:,}" if isinstance(v, int) else f"{k} bits: {v}" for k, v in value.items())
        if name == "warnings":
            continue
        typer.echo(
            f"{name.replace('_', ' ')}: {value:,}" if type(value) is int else f"{name.replace('_', ' ')}: {value}"
        )
    for note in summary["warnings"]:
        typer.echo(f"warning: {note}", err=True)
