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
from quality_parts import (
    METHODS,
    WIDTHS,
    Setup,
    Weights,
    bootstrap,
    bootstrap_ratio,
    code_bytes,
    prepare,
    quantized,
    random_plans,
    true_bytes,
)
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from scipy.stats import spearmanr

from pagedweight.calibration.collect import collect
from pagedweight.calibration.divergence import Divergence, diverge
from pagedweight.calibration.sensitivity import FORMS, measure_sensitivity
from pagedweight.calibration.statistics import Statistics

RESULTS = Path(__file__).parent / "results"
PLAN_MEAN_BITS = 3.5
Advance = Callable[[], None]


class Record:
    """A model's measurements so far, on disk after every one."""

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self.path = path
        self.content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if self.content.get("settings") != settings:
            self.content = {"settings": settings, "cells": {}, "plans": {}}

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
            weights = Weights(setup, quantized(setup, method, statistics))
            for bits in missing:
                weights.write([bits] * setup.layout.rows)
                cells[f"{method}/{bits}"] = measure(setup)
                record.save()
                advance()
            weights.restore()


def measure_plans(
    setup: Setup, statistics: Statistics, record: Record, method: str, count: int, advance: Advance
) -> None:
    """KL of random mixed-width plans within 1 % of equal code bytes, beside the damage that each form predicts."""
    plans = random_plans(setup.layout, count, PLAN_MEAN_BITS, seed=0)
    measured = record.content["plans"].setdefault(method, {"measured": []})
    if len(measured["measured"]) >= count:
        return
    blocks = quantized(setup, method, statistics)
    modules = [experts.module for experts in setup.found]
    rows = np.arange(setup.layout.rows)
    for form in FORMS:
        table = measure_sensitivity(setup.layout, modules, statistics, blocks.__getitem__, form=form)
        s = table.s_bar * table.m_cal[:, None]
        measured[form] = [float(s[rows, np.searchsorted(WIDTHS, plan)].sum()) for plan in plans]
    weights = Weights(setup, blocks)
    for plan in plans[len(measured["measured"]) :]:
        weights.write(plan.tolist())
        kl = np.concatenate([diverge(setup.model, reference).kl for reference in setup.references.values()])
        measured["measured"].append(float(kl.mean()))
        if len(measured["measured"]) % 10 == 0:
            record.save()
        advance()
    weights.restore()
    record.save()


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
        folder, arguments.data, arguments.device, arguments.windows, arguments.length, arguments.calibration_windows
    )
    plan_setup = setup._replace(references={k: first(r, arguments.plan_windows) for k, r in setup.references.items()})
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(f"{folder.name}: calibrate", total=len(setup.calibration.tokens))
        statistics = collect(
            setup.model,
            setup.found,
            setup.calibration.batches(arguments.rows, arguments.device),
            advance=partial(progress.advance, task),
        )
        task = progress.add_task(f"{folder.name}: uniform widths", total=len(METHODS) * len(WIDTHS))
        measure_uniform(setup, statistics, record, partial(progress.advance, task))
        for method in arguments.plan_methods if arguments.plans else ():
            task = progress.add_task(f"{folder.name}: plans, {method}", total=arguments.plans)
            advance = partial(progress.advance, task)
            measure_plans(plan_setup, statistics, record, method, arguments.plans, advance)
    record.content["bytes"] = {
        str(b): [count(setup.layout, np.full(setup.layout.rows, b)) for count in (code_bytes, true_bytes)]
        for b in WIDTHS
    }
    record.save()
    return record


def first(reference, windows: int):
    cut = reference.windows
    return reference._replace(
        windows=cut._replace(tokens=cut.tokens[:windows], mask=cut.mask[:windows]), hidden=reference.hidden[:windows]
    )


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
    for method, plans in content["plans"].items():
        measured = plans["measured"]
        ranks = ", ".join(f"{spearmanr(plans[f][: len(measured)], measured)[0]:.3f} {f}" for f in FORMS if f in plans)
        lines += ["", f"Rank correlation of predicted and measured damage, {len(measured)} random plans at equal code"]
        lines += [f"bytes ({PLAN_MEAN_BITS} bits), {method}: {ranks}."]
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
    parser.add_argument("--rows", type=int, default=8, help="windows per calibration batch")
    parser.add_argument("--plans", type=int, default=200, help="random mixed-width plans; 0 leaves them out")
    parser.add_argument("--plan-windows", type=int, default=8, help="windows per text that plans are measured on")
    parser.add_argument("--plan-methods", nargs="*", default=["fast"], choices=list(METHODS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    records = [run(folder, arguments) for folder in arguments.models]
    text = "\n".join(table(record) for record in records)
    (arguments.out / "quality.md").write_text("# Quality by level and width\n\n" + text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
