"""KL of a model to itself before quantizing, by codebook, quantizer level and width.

    python -m bench.codebooks MODEL [MODEL ...] --calibration c4_train.txt --text WikiText-2=test.txt \\
        --text C4=c4.jsonl --out bench/results

Dequantized weights stand in for the experts', so the figures are the format's own, whatever the kernels. Writes
codebooks-<model>-<parent>bits.json after every measurement (a killed run goes on from there), and codebooks.md from all
of the folder's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.progress import MofNCompleteColumn, Progress

from bench.quality_judge import Answers, Judge, take_answers
from bench.quality_keep import Kept
from bench.quality_parts import (
    METHODS,
    ROUNDING_NATS,
    Trained,
    add_arguments,
    bootstrap_ratio,
    command,
    load,
    machine,
    quantized,
    rounded,
    rows_per_forward,
    settings_of,
)
from pagedweight.calibration.statistics import Statistics
from pagedweight.layout import Layout

LEVELS = ("balanced", "best, tables not tuned")


def choices(parent: int) -> dict[str, dict[int, str]]:
    """Codebooks by width, up to the parent width. lut8 has no table above 4 bits, cubic none at 2."""
    widths = range(2, parent + 1)

    def codebooks(low: str, high: str, above: int) -> dict[int, str]:
        return {bits: high if bits > above else low for bits in widths}

    return {
        "lut16": codebooks("lut16", "lut16", 4),
        "lut8 to 4 bits, lut16 above": codebooks("lut8", "lut16", 4),
        "lut16 to 4 bits, cubic above": codebooks("lut16", "cubic", 4),
        "lut8 to 4 bits, cubic above": codebooks("lut8", "cubic", 4),
        "lut16 at 2 bits, cubic above": codebooks("lut16", "cubic", 2),
        "affine": codebooks("affine", "affine", 4),
    }


def measure(
    trained: Trained, method: str, codebooks: Mapping[int, str], statistics: Statistics, answers: list[Answers]
) -> dict[str, list[float]]:
    """KL in nats of every window of all texts, by width."""
    layout = Layout(trained.layout.moe_layers, tuple(codebooks), codebooks)
    blocks = quantized(trained, method, statistics, codebooks)
    judge = Judge(trained.model, trained.found, layout, blocks.__getitem__)
    plans = {bits: np.full(layout.rows, w) for w, bits in enumerate(codebooks)}
    return {
        str(bits): rounded(np.concatenate([judge.figures(given, plan).kl for given in answers]))
        for bits, plan in plans.items()
    }


def run(folder: Path, arguments: argparse.Namespace, progress: Progress) -> None:
    trained = load(folder, arguments)
    rows = rows_per_forward(arguments)
    statistics = Kept.of(trained, arguments.keep).statistics()
    answers = [take_answers(trained.model, text, rows=rows) for text in trained.texts.values()]
    tried = choices(arguments.parent)
    task = progress.add_task(folder.name, total=len(arguments.methods) * len(tried))
    path = arguments.out / f"codebooks-{folder.name}-{arguments.parent}bits.json"
    settings = {**settings_of(arguments, folder), "parent": arguments.parent}
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if record.get("settings") != settings:
        record = {"settings": settings, "kl_nats": {}}
    record |= {"machine": machine(arguments.device), "command": command("bench.codebooks")}
    path.parent.mkdir(parents=True, exist_ok=True)
    for method in arguments.methods:
        known = record["kl_nats"].setdefault(method, {})
        for name, codebooks in tried.items():
            if name not in known:
                known[name] = measure(trained, method, codebooks, statistics, answers)
                path.write_text(json.dumps(record) + "\n", encoding="utf-8")
            progress.advance(task)


def report(records: list[dict]) -> str:
    """Markdown: KL by codebooks and width, and in brackets its ratio to lut16 of the same level and width."""
    lines = ["# Codebooks by width", ""]
    for record in records:
        settings = record["settings"]
        lines += [f"## {settings['model']}, parent width {settings['parent']}", ""]
        lines += [f"{settings['windows']} windows of {settings['tokens']} tokens of each of {settings['texts']};"]
        lines += [f"{record['machine']}. KL in 10^-3 nats; in brackets beside lut16, 95 % interval.", ""]
        widths = range(2, settings["parent"] + 1)
        lines += ["| level | codebooks | " + " | ".join(f"{bits} bits" for bits in widths) + " |"]
        lines += ["|" + " --- |" * (2 + len(widths))]
        for method, choices in record["kl_nats"].items():
            for name, kl in choices.items():
                cells = [_cell(np.array(kl[str(b)]), np.array(choices["lut16"][str(b)])) for b in widths]
                lines += [f"| {method} | {name} | " + " | ".join(cells) + " |"]
        lines += [""]
    return "\n".join(lines)


def _cell(kl: np.ndarray, tables: np.ndarray) -> str:
    if tables.mean() < ROUNDING_NATS:
        return f"{1e3 * kl.mean():.3f}"
    low, high = bootstrap_ratio(kl, tables)
    return f"{1e3 * kl.mean():.3f} [{kl.mean() / tables.mean():.2f}, {low:.2f} to {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--methods", nargs="*", default=LEVELS, choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--parent", type=int, default=6, choices=range(3, 9), help="the widest width")
    arguments = parser.parse_args()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
        for folder in arguments.models:
            run(folder, arguments, progress)
    text = report([json.loads(path.read_text()) for path in sorted(arguments.out.glob("codebooks-*bits.json"))])
    (arguments.out / "codebooks.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
