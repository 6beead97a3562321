"""Section of the results page about decoding: the paper's Table 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench.e2e.throughput_check import ERROR_LIMIT
from bench.e2e.throughput_peers import GROUPED, MARLIN, NO_TIME, NOT_COMPILED
from scripts.results_tables import Lines, made_by, table

MODELS = {"qwen": "Qwen1.5-MoE-A2.7B", "mixtral": "Mixtral-8x7B"}
# fast: lines at 5 and 6 bits
TABLES = {"lut16": "16-bit tables", "fast": "byte tables"}
TABLES |= {f"{name} from 2 bits": f"{text}, from 2 bits" for name, text in TABLES.items()}
WIDTHS = (3, 4)  # set beside the others; the paper compares these two
PEERS = {
    NO_TIME: "the limit: no experts at all",
    MARLIN: "4 bits, vLLM Marlin",
    NOT_COMPILED: f"bf16, {GROUPED}, layers not compiled",
}
CALLED = {
    "generate": "called by generate, no graphs",
    "compiled generate": "called by generate, compiled by it (static cache)",
}


def throughput(record: Mapping[str, Any]) -> Lines:
    """Tokens/s and peak reserved memory."""
    model = record.get("model", "qwen")
    kinds = (("shared", "the shared expert paged too"), ("compiled", "layers compiled by torch.compile"))
    tables = dict.fromkeys(TABLES[row["codebooks"]] for row in record.get("paged", []))
    title = f"{MODELS[model]} shape, {record.get('layers', 24)} layers, {' and '.join(tables)}"
    yield f"### {'; '.join([title, *(text for name, text in kinds if record.get(name))])}"
    yield ""
    paged = sorted(record.get("paged", []), key=lambda row: (row["width"], row["experts"] == "mixed"))
    yield from speeds("experts, every step one graph", [*record["dense"], *paged])
    bars = [bar for bar in record.get("bars", []) if bar["width"] in WIDTHS]
    yield from beside(sorted(bars, key=lambda bar: bar["width"]))
    for name, title in CALLED.items():
        if record.get(name):
            yield from speeds(title, record[name])
            yield from beside(generate_bars(record, name))
    yield from steadiness(record)
    checked = record.get("answers")
    if checked:
        batches = ", ".join(str(batch) for batch in sorted({row["batch"] for row in checked}))
        yield (
            f"Answers of one layer beside transformers' own experts over the same weights, {batches} sequences, each "
            f"width and mixed: at most {100 * max(row['error'] for row in checked):.1f} % of the largest logit apart "
            f"(limit {100 * ERROR_LIMIT:.0f} %)."
        )
        yield ""
    if record.get("shared") and any(row["experts"] == NO_TIME for row in record["dense"]):
        yield "The limit has no routed experts; its shared one is in bf16, so that ours, paged too, can be beyond it."
        yield ""
    yield from ended(record)


def moving(record: Mapping[str, Any]) -> Lines:
    """Captured steps while pages leave and come back: runs of that alone."""
    tables = dict.fromkeys(TABLES[row["codebooks"]] for row in record["moving"])
    yield f"### {MODELS[record['model']]} shape, {record['layers']} layers, {' and '.join(tables)}"
    yield ""
    yield from steadiness(record)
    yield from ended(record)


def ended(record: Mapping[str, Any]) -> Lines:
    """What has to be known, and where the figures come from."""
    if "note" in record:
        yield record["note"]
        yield ""
    yield from made_by(record, f"{record['gpu']}, torch, Triton and transformers {', '.join(record['versions'])}")


def steadiness(record: Mapping[str, Any]) -> Lines:
    """What mixed widths and moving pages cost."""
    mixed = [
        (f"mixed, {row['width']} bits, {TABLES[row['codebooks']]}", row["batch"], percent(row["slower_than_uniform"]))
        for row in record.get("paged", [])
        if "slower_than_uniform" in row
    ]
    moved = [
        (
            f"pages leave and come back, {TABLES[row['codebooks']]}",
            row["batch"],
            f"{percent(row['slower_than_still'])} (median {percent(now / still - 1)}), "
            f"{row['released_bytes'] / 1e6:.0f} out, {row['loaded_bytes'] / 1e6:.0f} in",
        )
        for row in record.get("moving", [])
        for now, still in [row["median_step_ms"]]
    ]
    yield from by_batch("% more time than the uniform width of the same bytes", "{}", mixed)
    yield from by_batch("% more time than the same steps held still; MB moved", "{}", moved)


def percent(share: float) -> str:
    return f"{100 * share:+.1f}"


def speeds(title: str, rows: Iterable[Mapping[str, Any]]) -> Lines:
    yield from by_batch(title, "{}: GB, tokens/s", ((named_row(row), row["batch"], of_speed(row)) for row in rows))


def beside(bars: Iterable[Mapping[str, Any]]) -> Lines:
    cells = (
        (
            f"{bar['width']} bits, {TABLES[bar['codebooks']]}, beside {peer(bar['against'])}",
            bar["batch"],
            ("-" if bar["against"] == NO_TIME else f"{100 * bar['memory_saved']:.1f} %")
            + f", {bar['times_tokens_per_second']:.2f}",
        )
        for bar in bars
    )
    yield from by_batch("beside", "{}: memory saved, times tokens/s", cells)


def by_batch(title: str, column: str, cells: Iterable[tuple[str, int, str]]) -> Lines:
    """A line for each name, a column for each batch size, repeated runs side by side; nothing without cells."""
    named: dict[str, dict[int, str]] = {}
    for name, batch, cell in cells:
        before = named.setdefault(name, {}).get(batch)
        named[name][batch] = cell if before is None else f"{before}; {cell}"
    batches = sorted({batch for found in named.values() for batch in found})
    if named:
        yield from table(
            [title, *(column.format(f"B = {batch}") for batch in batches)],
            ((name, *(found.get(batch, "-") for batch in batches)) for name, found in named.items()),
        )


def generate_bars(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What generate calls at a width, and then graphs at that width, beside what it calls in bf16."""
    called = record[name]
    rows = [(row, "") for row in called if "width" in row]
    if name == "generate":
        rows += [(row, " (here in graphs)") for row in record.get("paged", []) if row["experts"] == "uniform"]
    return [
        {
            **{name: row[name] for name in ("batch", "width", "codebooks")},
            "against": f"{named_row(other)}{how}",
            "memory_saved": 1 - row["peak_reserved_bytes"] / max(1, other["peak_reserved_bytes"]),
            "times_tokens_per_second": row["tokens_per_second"] / other["tokens_per_second"],
        }
        for other in called
        for row, how in rows
        if "width" not in other and other["batch"] == row["batch"] and row["width"] in WIDTHS
    ]


def named_row(row: Mapping[str, Any]) -> str:
    cache = f", {row['cache']} cache" if "cache" in row else ""
    if "width" in row:
        return f"{row['experts']}, {row['width']} bits, {TABLES[row['codebooks']]}{cache}"
    return f"{row['experts']}{cache}" if cache else peer(row["experts"])


def peer(experts: str) -> str:
    return PEERS.get(experts, experts if experts.startswith("bf16") else f"bf16, {experts}")


def of_speed(row: Mapping[str, Any]) -> str:
    held = "-" if row["experts"] == NO_TIME else f"{row['peak_reserved_bytes'] / 1e9:.2f}"
    return f"{held}, {row['tokens_per_second']:.1f}"
