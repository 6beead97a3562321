"""`pagedweight inspect`: what a folder with pages holds, on the terminal, as JSON or as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedweight.cli.common import fail, require_extras

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.cli.inspect_facts import Facts, LayerFacts

MIB = 2**20
COLD_NAMED = 8


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that quantize or save wrote.", file_okay=False)],
    picture: Annotated[
        list[Path] | None, typer.Option(help="Draw the sensitivity map here too, as .png or .svg. Repeatable.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every page and compare checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Blocks, widths, bytes at each width, cold experts and sensitivity of a quantized model."""
    for path in picture or ():
        if path.suffix not in (".png", ".svg"):
            raise fail(f"--picture {path}: name a file that ends in .png or .svg")
    if picture:
        require_extras("plots")
    from pagedweight.checkpoint import CheckpointError
    from pagedweight.cli.bars import bars
    from pagedweight.cli.inspect_facts import facts_of

    try:
        with bars() as progress:
            facts = facts_of(checkpoint, verify=progress if verify else None)
    except (CheckpointError, ValueError) as error:
        raise fail(str(error)) from error
    if picture:
        _draw(facts, picture)
    if as_json:
        typer.echo(json.dumps(facts.document()))
        return
    from rich.console import Console

    show(facts, Console())


def _draw(facts: Facts, paths: list[Path]) -> None:
    from pagedweight.cli.inspect_picture import draw_sensitivity

    figure = draw_sensitivity(facts)
    for path in paths:
        try:
            figure.savefig(path)
        except OSError as error:
            raise fail(f"--picture {path}: {error.strerror}") from error


def show(facts: Facts, console: Console) -> None:
    """The tables and the map."""
    from rich.table import Table
    from rich.text import Text

    made = ", ".join(f"{name} {value}" for name, value in sorted(facts.recipe.items()) if len(value) < 20)
    holds = (
        f": {len(facts.layers)} MoE layers, {facts.layout.rows:,} linear-blocks, {facts.layout.weights():,} weights"
        f"{f' ({made})' if made else ''}"
    )
    console.print(Text.assemble((str(facts.folder), "bold"), holds), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("bits", "codebook", "planes MiB", "tables MiB", "in frames MiB", "bits a weight", "sensitivity"):
        table.add_column(name, justify="left" if name == "codebook" else "right")
    for bits, seen in facts.widths.items():
        sizes = (seen.planes_bytes, seen.tables_bytes, seen.resident_bytes)
        mib = (f"{size / MIB:,.1f}" for size in sizes)
        table.add_row(str(bits), seen.codebook, *mib, f"{seen.bits_per_weight:.2f}", f"{seen.sensitivity:.4g}")
    console.print(table)
    if not facts.calibrated:
        console.print("not calibrated: sensitivity is quantization error alone", soft_wrap=True)
    _show_map(facts, console)


def _show_map(facts: Facts, console: Console) -> None:
    """A row of colour for each layer: experts from the most to the least sensitive at the floor width."""
    from rich.text import Text

    from pagedweight.cli.heat import cells, legend

    floor = [layer.sensitivity[:, :, 0].sum(axis=1) for layer in facts.layers]
    ends = min(float(s.min()) for s in floor), max(float(s.max()) for s in floor)
    console.print(f"sensitivity of experts at {facts.layout.floor_width} bits, most sensitive first, and cold experts")
    for layer, values in zip(facts.layers, floor, strict=True):
        line = Text(f"layer {layer.shape.layer:>3} ")
        line.append_text(cells(sorted(values.tolist(), reverse=True), ends, console))
        console.print(line.append(f" {_cold(layer)}"), soft_wrap=True)
    console.print(legend(ends, console))


def _cold(layer: LayerFacts) -> str:
    if not layer.cold:
        return f"of {layer.shape.experts}, none cold"
    named = ", ".join(map(str, layer.cold[:COLD_NAMED])) + (", ..." if len(layer.cold) > COLD_NAMED else "")
    return f"of {layer.shape.experts}, {len(layer.cold)} cold: {named}"
