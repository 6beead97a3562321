"""Quality of every quantizer level at every uniform width, and how well predicted damage ranks mixed-width plans.

    python bench/quality.py ../shared/models/tiny-qwen2-moe [more models ...] [--data ../shared/data]

Dequantized weights are written into the float model, so the figures are the format's own, whatever the kernels. Writes
bench/results/quality-<model>.json after every measurement (a killed run goes on from there) and quality.md from all.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from quality_damage import damage_lines, measure_damage
from quality_parts import (
    METHODS,
    WIDTHS,
    Setup,
    bootstrap,
    bootstrap_ratio,
    code_bytes,
    prepare,
    quantized,
    true_bytes,
)
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from pagedweight.calibration.collect import collect
from pagedweight.calibration.divergence import Divergence, diverge
from pagedweight.calibration.importance import routing_mass
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.substitution import substituted

RESULTS = Path(__file__).parent / "results"
Advance = Callable[[], None]


class Record:
    """A model's measurements so far, on disk after every one."""

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self.path = path
        self.content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if self.content.get("settings") != settings:
            self.content = {"settings": settings, "cells": {}, "damage": {}}

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content) + "\n", encoding="utf-8")


def measure(setup: Setup) -> dict[str, dict[str, list[float]]]:
    """By text and figure, one value per window."""
    figures = {name: diverge(setup.model, reference) for name, reference in setup.references.items()}
    return {name: {k: [round(float(x), 7) for x in v] for k, v in f._asdict().items()} for name, f in figures.items()}


def measure_uniform(setup: Setup, statistics: Statistics, record: Record, advance: Advance) -> None:
    """Every method at every width that the record lacks, and the model itself."""
    cells = record.content["cells"]
    if "bf16" not in cells:
        cells["bf16"] = measure(setup)
        record.save()
    for method in METHODS:
        missing = [bits for bits in WIDTHS if f"{method}/{bits}" not in cells]
        if missing:
            blocks = quantized(setup, method, statistics)
            with substituted(setup.found, setup.layout, blocks.__getitem__) as weights:
                for bits in missing:
                    weights.write(np.full(setup.layout.rows, bits))
                    cells[f"{method}/{bits}"] = measure(setup)
                    record.save()
                    advance()


def run(folder: Path, arguments: argparse.Namespace) -> Record:
    settings = {
        "model": folder.name,
        "windows": arguments.windows,
        "tokens": arguments.length,
        "calibration_windows": arguments.calibration_windows,
    }
    record = Record(arguments.out / f"quality-{folder.name}.json", settings)
    record.content["machine"] = machine(arguments.device)
    setup = prepare(
        folder,
        arguments.data,
        arguments.device,
        arguments.windows,
        arguments.length,
        arguments.calibration_windows,
        arguments.rows,
    )
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(f"{folder.name}: calibrate", total=len(setup.calibration.tokens))
        batches = setup.calibration.batches(arguments.rows, arguments.device)
        statistics = collect(setup.model, setup.found, batches, advance=partial(progress.advance, task))
        record.content["routing_mass"] = [
            routing_mass(layer).cpu().numpy().round(5).tolist() for layer in statistics.layers
        ]
        task = progress.add_task(f"{folder.name}: uniform widths", total=len(METHODS) * len(WIDTHS))
        measure_uniform(setup, statistics, record, partial(progress.advance, task))
        for method in arguments.damage if arguments.plans else ():
            if method not in record.content["damage"]:
                total = arguments.plans + setup.layout.rows
                task = progress.add_task(f"{folder.name}: damage, {method}", total=total)
                blocks = quantized(setup, method, statistics)
                record.content["damage"][method] = measure_damage(
                    setup, statistics, blocks, arguments.plan_windows, arguments.plans, partial(progress.advance, task)
                )
                record.save()
    record.content["bytes"] = {
        str(b): [count(setup.layout, np.full(setup.layout.rows, b)) for count in (code_bytes, true_bytes)]
        for b in WIDTHS
    }
    record.save()
    return record


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"


def table(record: Record) -> str:
    """The model's markdown: one row per width and method, and the plans' rank correlations."""
    content, lines = record.content, []
    settings, texts = content["settings"], list(content["cells"]["bf16"])
    base = next(iter(METHODS))
    lines += [f"## {settings['model']}", ""]
    lines += [f"{settings['windows']} windows of {settings['tokens']} tokens per text; {content['machine']}", ""]
    names = [f"{text} {figure}" for text in texts for figure in ("perplexity", "KL, nats", "top-1")]
    lines += [
        "| bits | method | " + " | ".join(names) + " | KL beside importance 1 |",
        "|" + " --- |" * (len(names) + 3),
    ]
    lines += ["| 16 | bf16 | " + " | ".join(figures(content["cells"]["bf16"], texts)) + " | |"]
    for bits in WIDTHS:
        for method in METHODS:
            cell, other = content["cells"].get(f"{method}/{bits}"), content["cells"].get(f"{base}/{bits}")
            if cell and other:
                above, below = pooled_kl(cell), pooled_kl(other)
                low, high = bootstrap_ratio(above, below)
                ratio = f"{above.mean() / below.mean():.2f} ({low:.2f} to {high:.2f})"
                lines += [f"| {bits} | {method} | " + " | ".join(figures(cell, texts)) + f" | {ratio} |"]
    sizes = ", ".join(f"{bits}: {codes:,} / {true:,}" for bits, (codes, true) in content["bytes"].items())
    lines += ["", f"Bytes of the experts by width, codes alone / with 16-bit tables: {sizes}"]
    if content["damage"]:
        lines += damage_lines(content["damage"])
    return "\n".join(lines) + "\n"


def pooled_kl(cell: dict[str, dict[str, list[float]]]) -> np.ndarray:
    return np.concatenate([np.array(figures["kl"]) for figures in cell.values()])


def figures(cell: dict[str, dict[str, list[float]]], texts: list[str]) -> list[str]:
    out = []
    for text in texts:
        values = Divergence(*(np.array(cell[text][name]) for name in Divergence._fields))
        low, high = bootstrap(values.kl)
        out += [f"{math.exp(values.loss.mean()):.2f}", f"{values.kl.mean():.5f} ({low:.5f} to {high:.5f})"]
        out += [f"{100 * values.agreement.mean():.1f} %"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows per text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-windows", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="windows per forward")
    parser.add_argument("--plans", type=int, default=200, help="random mixed-width plans; 0 leaves them out")
    parser.add_argument("--plan-windows", type=int, default=8, help="windows per text that plans are measured on")
    parser.add_argument("--damage", nargs="*", default=["fast", "best"], choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    records = [run(folder, arguments) for folder in arguments.models]
    text = "\n".join(table(record) for record in records)
    (arguments.out / "quality.md").write_text("# Quality by level and width\n\n" + text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
