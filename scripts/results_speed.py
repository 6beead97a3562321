"""Section of the results page about decoding: the paper's Table 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.e2e.throughput_peers import MARLIN, NO_TIME
from scripts.results_tables import Lines, made_by, table

MODELS = {"qwen": "Qwen1.5-MoE-A2.7B", "mixtral": "Mixtral-8x7B"}
# fast: lines at 5 and 6 bits
TABLES = {"lut16": "16-bit tables", "fast": "byte tables"}
TABLES |= {f"{name} from 2 bits": f"{text}, from 2 bits" for name, text in TABLES.items()}
BARS = ((1, 3), (4, 4), (16, 4), (64, 4))  # batch and width; the paper compares the first two
PEERS = {NO_TIME: "the limit: no experts at all", MARLIN: "4 bits, vLLM Marlin"}


def throughput(record: Mapping[str, Any]) -> Lines:
    """Tokens/s and peak reserved memory."""
    model = record.get("model", "qwen")
    kinds = (("shared", "the shared expert paged too"), ("compiled", "layers compiled by torch.compile"))
    title = f"{MODELS[model]} shape, {record.get('layers', 24)} layers"
    yield f"### {'; '.join([title, *(text for name, text in kinds if record.get(name))])}"
    yield ""
    yield from speeds("experts, every step one graph", [*record["dense"], *record.get("paged", [])])
    yield from beside([bar for bar in record.get("bars", []) if (bar["batch"], bar["width"]) in BARS])
    if record.get("generate"):
        yield from speeds("called by generate, no graphs", record["generate"])
        yield from beside(generate_bars(record))
    mixed = [row for row in record.get("paged", []) if "slower_than_uniform" in row]
    if mixed:
        yield "Mixed widths beside the uniform width of the same bytes, in turns: " + "; ".join(
            f"{at(row)}: {100 * row['slower_than_uniform']:+.1f} % time" for row in mixed
        )
        yield ""
    if record.get("moving"):
        yield "While pages leave and come back, beside the same steps held still: " + "; ".join(
            f"{TABLES[row['codebooks']]}, B = {row['batch']}: {100 * row['slower_than_still']:+.1f} % time "
            f"(median {100 * (row['median_step_ms'][0] / row['median_step_ms'][1] - 1):+.1f} %), "
            f"{row['released_bytes'] / 1e6:.0f} MB out and {row['loaded_bytes'] / 1e6:.0f} MB in"
            for row in record["moving"]
        )
        yield ""
    if "note" in record:
        yield record["note"]
        yield ""
    yield from made_by(record, f"{record['gpu']}, torch, Triton and transformers {', '.join(record['versions'])}")


def speeds(title: str, rows: Iterable[Mapping[str, Any]]) -> Lines:
    """A line for each kind of experts, a column for each batch size."""
    named: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        named.setdefault(named_row(row), {})[row["batch"]] = row
    batches = sorted({batch for found in named.values() for batch in found})
    yield from table(
        [title, *(f"B = {batch}: GB, tokens/s" for batch in batches)],
        ((name, *(of_speed(found.get(batch)) for batch in batches)) for name, found in named.items()),
    )


def beside(bars: Sequence[Mapping[str, Any]]) -> Lines:
    if not bars:
        return
    yield from table(
        ["beside", "memory saved", "times tokens/s"],
        (
            (
                f"{at(bar)}, beside {peer(bar['against'])}",
                "" if bar["against"] == NO_TIME else f"{100 * bar['memory_saved']:.1f} %",
                f"{bar['times_tokens_per_second']:.2f}",
            )
            for bar in bars
        ),
    )


def generate_bars(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What generate calls at a width, and then graphs at that width, beside what it calls in bf16."""
    called = record["generate"]
    rows = [(row, "generate") for row in called if "width" in row]
    rows += [(row, "graphs") for row in record.get("paged", []) if row["experts"] == "uniform"]
    return [
        {
            **{name: row[name] for name in ("batch", "width", "codebooks")},
            "against": f"generate, {other['cache']} cache" + (" (here in graphs)" if how == "graphs" else ""),
            "memory_saved": 1 - row["peak_reserved_bytes"] / max(1, other["peak_reserved_bytes"]),
            "times_tokens_per_second": row["tokens_per_second"] / other["tokens_per_second"],
        }
        for batch, width in BARS
        for other in called
        for row, how in rows
        if "width" not in other and other["batch"] == row["batch"] == batch and row["width"] == width
    ]


def at(row: Mapping[str, Any]) -> str:
    return f"B = {row['batch']}, {row['width']} bits, {TABLES[row['codebooks']]}"


def named_row(row: Mapping[str, Any]) -> str:
    cache = f", {row['cache']} cache" if "cache" in row else ""
    if "width" in row:
        return f"{row['experts']}, {row['width']} bits, {TABLES[row['codebooks']]}{cache}"
    return f"bf16{cache}" if cache else peer(row["experts"])


def peer(experts: str) -> str:
    return PEERS.get(experts, f"bf16, {experts}")


def of_speed(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    held = "-" if row["experts"] == NO_TIME else f"{row['peak_reserved_bytes'] / 1e9:.2f}"
    return f"{held}, {row['tokens_per_second']:.1f}"
