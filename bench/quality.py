"""Quality of every quantizer level at every uniform width, and how well predicted damage ranks mixed-width plans.

    python -m bench.quality MODEL [MODEL ...] --calibration c4_train.txt --text WikiText-2=test.txt \\
        --text C4=c4.jsonl --out bench/results

Dequantized weights stand in for the experts', so the figures are the format's own, whatever the kernels. Writes
quality-<model>.json after every measurement (a killed run goes on from there) and quality.md from all of the folder's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from bench.quality_damage import live_mass, measure_damage
from bench.quality_judge import Answers, Judge, take_answers
from bench.quality_keep import Kept
from bench.quality_parts import (
    METHODS,
    WIDTHS,
    Trained,
    add_arguments,
    code_bytes,
    command,
    load,
    machine,
    rounded,
    rows_per_forward,
    settings_of,
    true_bytes,
)
from bench.quality_report import report
from pagedweight.calibration.statistics import Statistics

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


class Run:
    """One model's measurements: what the record lacks is measured, each method's linear-blocks made once."""

    def __init__(self, trained: Trained, record: Record, rows: int, keep: Kept, progress: Progress) -> None:
        self.trained, self.record, self.rows, self.keep, self.progress = trained, record, rows, keep, progress
        self.answers = {name: take_answers(trained.model, text, rows=rows) for name, text in trained.texts.items()}

    def collect(self) -> Statistics:
        trained = self.trained
        task = self.progress.add_task(f"{trained.name}: calibrate", total=len(trained.calibration.tokens))
        statistics = self.keep.statistics(partial(self.progress.advance, task))
        mass = [statistics.routing_mass(index).cpu().numpy() for index in range(len(trained.found))]
        seen = {name: live_mass(trained, text) for name, text in trained.texts.items()}
        texts = {name: np.split(m[::2], np.cumsum([len(own) for own in mass])[:-1]) for name, m in seen.items()}
        self.record.content["routing_mass"] = {
            name: [own.round(5).tolist() for own in layers] for name, layers in {"calibration": mass, **texts}.items()
        }
        return statistics

    def judge(self, method: str, statistics: Statistics) -> tuple[Judge, dict]:
        task = self.progress.add_task(f"{self.trained.name}: quantize, {method}", total=None)
        blocks = self.keep.blocks(method, statistics)
        self.progress.remove_task(task)
        return Judge(self.trained.model, self.trained.found, self.trained.layout, blocks.__getitem__), blocks

    def uniform(self, method: str, judge: Judge) -> None:
        cells = self.record.content["cells"]
        task = self.progress.add_task(f"{self.trained.name}: uniform, {method}", total=len(WIDTHS))
        for w, bits in (*enumerate(WIDTHS), (len(WIDTHS), 16)):
            name = f"{method}/{bits}" if bits != 16 else "bf16"
            if name not in cells:
                cells[name] = measure(judge, self.answers, np.full(self.trained.layout.rows, w))
                self.record.save()
            self.progress.advance(task)


def measure(judge: Judge, answers: dict[str, Answers], index: np.ndarray) -> dict[str, dict[str, list[float]]]:
    """By text and figure, one value per window."""
    figures = {name: judge.figures(given, index) for name, given in answers.items()}
    return {name: {k: rounded(v) for k, v in f._asdict().items()} for name, f in figures.items()}


def run(folder: Path, arguments: argparse.Namespace, progress: Progress) -> None:
    record = Record(arguments.out / f"quality-{folder.name}.json", settings_of(arguments, folder))
    record.content["machine"] = machine(arguments.device)
    record.content["command"] = command("bench.quality")
    trained = load(folder, arguments)
    record.content["bytes"] = {
        str(b): [count(trained.layout, np.full(trained.layout.rows, b)) for count in (code_bytes, true_bytes)]
        for b in WIDTHS
    }
    running = Run(trained, record, rows_per_forward(arguments), Kept.of(trained, arguments.keep), progress)
    statistics = running.collect()
    for method in arguments.methods:
        wants_damage = arguments.plans and method in arguments.damage and method not in record.content["damage"]
        if wants_damage or any(f"{method}/{bits}" not in record.content["cells"] for bits in WIDTHS):
            judge, blocks = running.judge(method, statistics)
            running.uniform(method, judge)
            if wants_damage:
                total = arguments.plans + trained.layout.rows
                task = progress.add_task(f"{folder.name}: damage, {method}", total=total)
                record.content["damage"][method] = measure_damage(
                    trained, statistics, blocks, judge, running.rows, arguments.plans, arguments.plan_windows,
                    partial(progress.advance, task),
                )  # fmt: skip
                record.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--plans", type=int, default=200, help="random mixed-width plans; 0 leaves them out")
    parser.add_argument("--plan-windows", type=int, default=16, help="windows per text that plans are measured on")
    parser.add_argument("--damage", nargs="*", default=["fast", "best"], choices=list(METHODS), metavar="METHOD")
    arguments = parser.parse_args()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        for folder in arguments.models:
            run(folder, arguments, progress)
    text = report([json.loads(path.read_text()) for path in sorted(arguments.out.glob("quality-*.json"))])
    (arguments.out / "quality.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
