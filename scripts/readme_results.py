"""Rewrite the README's table of GPU results from bench/results: python scripts/readme_results.py"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "bench" / "results" / "h200-gpu-check.json"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"
WIDTHS = ("16", "2", "4", "6", "mixed")
BATCHES = (1, 16, 64, 512)


def table(record: dict) -> str:
    """Milliseconds of one MoE layer by model, tokens and width, and what the record was made with, as markdown."""
    timed = [row for row in record["rows"] if "ms" in row]
    timed.sort(key=lambda row: row["path"] == "decode")  # stable; the decode kernels serve the batches they have
    ms = {(row["model"], row["M"], row["widths"]): row["ms"] for row in timed}
    models = list(dict.fromkeys(row["model"] for row in record["rows"]))
    checked = [row for row in record["rows"] if "limit" in row]
    lines = [
        "| one MoE layer of | tokens | bf16 `grouped_mm` | 2 bits | 4 bits | 6 bits | every block at another width |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in models:
        for tokens in BATCHES:
            cells = " | ".join(f"{ms[model, tokens, width]:.3f} ms" for width in WIDTHS)
            lines.append(f"| {model} | {tokens} | {cells} |")
    worst = {kind: max(row["norm"] for row in checked if row["dtype"] == kind) for kind in ("bfloat16", "float16")}
    lines += [
        "",
        f"{record['gpu']}, torch {record['torch']}, triton {record['triton']}; weights from L2-cold memory. "
        f"Against fp64, {sum(row['ok'] for row in checked)} of {len(checked)} cases are within their limits; the "
        f"largest relative error, of norms, is {worst['bfloat16']:.1e} in bf16 and {worst['float16']:.1e} in fp16.",
    ]
    return "\n".join(lines) + "\n"


def rewritten(readme: str, record: dict) -> str:
    """The README with the table between its two marks replaced."""
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{table(record)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    path = ROOT / "README.md"
    record = json.loads(SOURCE.read_text(encoding="utf-8"))
    path.write_text(rewritten(path.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
