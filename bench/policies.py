"""Compares the planner with other policies and with its own ablations at the same bytes, on trained models.

    python bench/policies.py ../shared/models/tiny-qwen2-moe [more models ...] [--windows 64] [--bytes true]

Dequantized weights of the widths that a policy chooses are written into the float model, so kernels do not matter.
Policies that look at routing or prompts plan anew for each window, from that window. Writes
bench/results/policies-<model>.json after every few windows (a killed run goes on from there, and more windows extend
it) and bench/results/policies.md from all models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from policies_parts import Answers, Contest, calibrated, divergence, kept_answers
from policies_plans import BUDGET_BITS, CONTENDERS, Contender, mean_bits, plan_table
from policies_report import report
from quality_parts import METHODS, TEXTS, WIDTHS, Setup, prepare, true_bytes
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from pagedweight.calibration.sequences import observe_sequences
from pagedweight.calibration.substitution import Substitution, substituted

RESULTS = Path(__file__).parent / "results"
WORK = Path(__file__).parents[1] / "build" / "policies"
WINDOWS_BETWEEN_SAVES = 8


class Record:
    """A model's measurements so far: cells by policy and budget, each a list of windows by text."""

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self.path = path
        self.content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if self.content.get("settings") != settings:
            self.content = {"settings": settings, "cells": {}}

    def cell(self, name: str, budget: str) -> dict[str, dict[str, list[float]]]:
        empty = {text: {"kl": [], "loss": [], "bits": [], "true_bytes": []} for text in TEXTS}
        return self.content["cells"].setdefault(name, {}).setdefault(budget, empty)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content) + "\n", encoding="utf-8")


def measure(
    contest: Contest,
    contender: Contender,
    budget: str,
    windows: int,
    record: Record,
    weights: Substitution,
    advance: Callable[[int], None],
) -> None:
    """Every window that the record lacks for one contender and budget."""
    for text, answers in contest.answers.items():
        figures = record.cell(contender.name, budget)[text]
        done = len(figures["kl"])
        together = 1 if contender.live else WINDOWS_BETWEEN_SAVES
        for first in range(done, windows, together):
            chosen = range(first, min(first + together, windows))
            bits = contest.plan(contender, budget, text, first)
            weights.write(bits)
            kl, loss = divergence(contest.setup.model, answers, chosen)
            figures["kl"] += kl
            figures["loss"] += loss
            figures["bits"] += [round(mean_bits(contest.setup.layout, bits), 5)] * len(chosen)
            figures["true_bytes"] += [true_bytes(contest.setup.layout, bits)] * len(chosen)
            advance(len(chosen))
            if chosen[-1] % WINDOWS_BETWEEN_SAVES == WINDOWS_BETWEEN_SAVES - 1:
                record.save()
        record.save()


def answers_of(setup: Setup, signals: str) -> dict[str, Answers]:
    """The model's own answers by text, with the signals that each window, or its first half, gives."""
    found = {}
    for text, reference in setup.references.items():
        windows = reference.windows
        assert windows.mask.all(), f"{text} is too short for whole windows"
        first = windows.tokens.shape[1] // 2 if signals == "past" else 0
        if first:
            windows = windows._replace(mask=windows.mask & (torch.arange(windows.mask.shape[1]) < first))
        seen = observe_sequences(setup.model, setup.found, windows, setup.layout, rows=reference.rows)
        found[text] = kept_answers(setup.model, reference, seen, first)
    return found


def run(folder: Path, arguments: argparse.Namespace) -> Record:
    settings = {
        "model": folder.name,
        "tokens": arguments.length,
        "calibration_windows": arguments.calibration_windows,
        "method": arguments.method,
        "bytes": arguments.bytes,
        "signals": arguments.signals,
    }
    suffix = "-true-bytes" * (arguments.bytes == "true") + "-past" * (arguments.signals == "past")
    record = Record(arguments.out / f"policies-{folder.name}{suffix}.json", settings)
    setup = prepare(
        folder, arguments.data, "cpu", arguments.windows, arguments.length, arguments.calibration_windows, 8
    )
    contenders = [c for c in CONTENDERS if not arguments.only or c.name in arguments.only]
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        block, policy = calibrated(setup, arguments.method, WORK / f"{folder.name}-{arguments.method}", progress)
        record.content["policy"] = {
            name: np.asarray(getattr(policy, name)).tolist()
            for name in ("mass_trust", "alpha", "bucket_edges", "multipliers", "floors", "depth_caps")
        }
        answers = answers_of(setup, arguments.signals)
        contest = Contest(setup, policy, plan_table(setup.layout, arguments.bytes), answers)
        cells = [(c, budget) for c in contenders for budget in (c.budgets or list(map(str, BUDGET_BITS)))]
        task = progress.add_task(f"{folder.name}: policies", total=len(cells) * arguments.windows * len(TEXTS))
        with substituted(setup.found, setup.layout, block) as weights:
            for contender, budget in sorted(cells, key=lambda cell: cell[1]):
                done = sum(min(len(f["kl"]), arguments.windows) for f in record.cell(contender.name, budget).values())
                progress.advance(task, done)
                advance = partial(progress.advance, task)
                measure(contest, contender, budget, arguments.windows, record, weights, advance)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows per text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-windows", type=int, default=128)
    parser.add_argument("--method", default="fast", choices=list(METHODS), help="how linear-blocks are quantized")
    parser.add_argument("--bytes", default="code", choices=("code", "true"), help="whether budgets count 16-bit tables")
    parser.add_argument(
        "--signals", default="window", choices=("window", "past"), help="past: plan from a half, KL on the other"
    )
    parser.add_argument("--only", nargs="*", metavar="POLICY", help="measure these policies alone")
    arguments = parser.parse_args()
    assert WIDTHS[0] < min(BUDGET_BITS) <= max(BUDGET_BITS) <= WIDTHS[-1]
    torch.set_num_threads(1)
    shared = Path(__file__).parents[2] / "shared/models"
    names = ("tiny-qwen2-moe", "small-qwen2-moe", "small-mixtral")
    for folder in arguments.models or [shared / name for name in names]:
        run(folder, arguments)
    text = report([json.loads(path.read_text()) for path in sorted(arguments.out.glob("policies-*.json"))])
    (arguments.out / "policies.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
