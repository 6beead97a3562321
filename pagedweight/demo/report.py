"""What the demo shows: tables on the terminal, or one JSON object, and two files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedweight.demo.plot import draw_timeline
from pagedweight.demo.run import DemoResult
from pagedweight.demo.timeline import thinned

TABLE_ROWS = 14
NOTE = (
    "KL is the mean divergence of the next-token distribution from the bf16 model's. On a model this small the tables "
    "outweigh the planes, which no full-size model shows: read mean bits beside bytes."
)


def as_dict(result: DemoResult) -> dict:
    """The whole result as plain JSON values."""
    return {
        "budget_bytes": result.budget_bytes,
        "block_bytes": result.block_bytes,
        "seconds": round(result.seconds, 2),
        "prompt": result.prompt,
        "continuation": result.continuation,
        "quality": [row._asdict() | {"quality": row.quality._asdict()} for row in result.quality],
        "samples": [sample._asdict() | {"phase": sample.phase.value} for sample in result.samples],
    }


def write_files(result: DemoResult, folder: Path) -> None:
    """timeline.png, timeline.svg and demo.json in the folder, which is made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [folder / f"timeline.{kind}" for kind in ("png", "svg")]
    draw_timeline(result.samples, result.budget_bytes, pictures)
    (folder / "demo.json").write_text(json.dumps(as_dict(result), indent=1) + "\n", encoding="utf-8")


def print_report(result: DemoResult, folder: Path, as_json: bool) -> None:
    if as_json:
        json.dump(as_dict(result), sys.stdout)
        sys.stdout.write("\n")
        return
    console = Console()
    console.print(Text.assemble((result.prompt, "bold"), result.continuation), highlight=False, soft_wrap=True)
    console.print(_timeline_table(result))
    console.print(_quality_table(result))
    console.print(NOTE, highlight=False)
    written = f"{folder / 'timeline.png'} and {folder / 'demo.json'} written in {result.seconds:.0f} s"
    console.print(written, soft_wrap=True, markup=False)


def _timeline_table(result: DemoResult) -> Table:
    title = f"Memory over time in KiB; the budget is {_kib(result.budget_bytes)}"
    table = Table(title=title, title_justify="left")
    table.add_column("doing", no_wrap=True)
    for name in ("step", "tokens", "planes", "tables", "KV", "free", "KV blocks", "mean bits"):
        table.add_column(name, justify="right")
    for s in thinned(result.samples, TABLE_ROWS):
        sizes = (s.planes_bytes, s.tables_bytes, s.kv_bytes, s.free_bytes)
        numbers = (str(s.step), str(s.tokens), *map(_kib, sizes), str(s.kv_blocks), f"{s.mean_bits:.2f}")
        table.add_row(s.phase.value, *numbers)
    return table


def _quality_table(result: DemoResult) -> Table:
    table = Table(title="Held-out text", title_justify="left")
    table.add_column("experts at")
    for name in ("mean bits", "weights KiB", "perplexity", "KL, nats"):
        table.add_column(name, justify="right")
    for row in result.quality:
        quality = (f"{row.quality.perplexity:.2f}", f"{row.quality.kl_nats:.4f}")
        table.add_row(row.name, f"{row.mean_bits:.2f}", _kib(row.weight_bytes), *quality)
    return table


def _kib(count: float) -> str:
    return f"{count / 1024:,.0f}"
