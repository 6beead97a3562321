"""Compares the planner with other policies and with its own ablations at the same bytes, on trained models.

    python -m bench.policies MODEL [MODEL ...] --calibration c4_train.txt --text WikiText-2=test.txt \\
        --text C4=c4.jsonl --out bench/results

Dequantized weights of the widths that a policy chooses stand in for the experts', so kernels do not matter. Policies
that look at routing or prompts plan anew for each window, from its first half (KL is taken of the second) or, with
--signals window, from all of it. Writes policies-<model>[...].json, and policies.md from all of the folder's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from bench.policies_parts import Contest, Seen, see
from bench.policies_plans import BUDGET_BITS, CONTENDERS, FULL, Contender, mean_bits, plan_table
from bench.policies_report import report
from bench.quality_judge import Judge
from bench.quality_parts import (
    METHODS,
    Trained,
    add_arguments,
    kept,
    load,
    machine,
    rounded,
    rows_per_forward,
    settings_of,
    true_bytes,
)
from pagedweight.calibration.collect import collect
from pagedweight.calibration.pipeline import Calibration, Options, calibrate_model
from pagedweight.layout import BlockId, PackedBlock

SIGNALS = ("past", "window")
POLICY_FIELDS = ("mass_trust", "alpha", "bucket_edges", "multipliers", "floors", "depth_caps")


def prepare(
    trained: Trained, method: str, keep: Path | None, progress: Progress
) -> tuple[dict[BlockId, PackedBlock], Calibration]:
    """Linear-blocks and the policy calibrated for them, from calibration text alone."""
    task = progress.add_task(f"{trained.name}: quantize", total=None)
    statistics = collect(trained.model, trained.found, trained.calibration.batches(8, trained.device))
    blocks = kept(trained, method, statistics, keep)
    progress.remove_task(task)
    tasks: dict[str, TaskID] = {}

    def note(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = progress.add_task(f"{trained.name}: {step}", total=total)
        progress.update(tasks[step], completed=done)

    made = calibrate_model(
        trained.model, trained.layout, blocks.__getitem__, trained.calibration, Options(), note, statistics
    )
    return blocks, made


def measure(trained: Trained, contest: Contest, contender: Contender, budget: float) -> dict[str, dict[str, list]]:
    """By text and figure, one value per window."""
    cell = {}
    for text, seen in contest.texts.items():
        bits = contest.plans(contender, budget, seen)
        figures = {name: rounded(values) for name, values in contest.figures(seen, bits).items()}
        figures["bits"] = rounded(np.array([mean_bits(trained.layout, plan) for plan in bits]))
        figures["true_bytes"] = [true_bytes(trained.layout, plan) for plan in bits]
        cell[text] = figures
    return cell


def run(folder: Path, arguments: argparse.Namespace, progress: Progress) -> None:
    trained = load(folder, arguments)
    rows = rows_per_forward(arguments)
    blocks, made = prepare(trained, arguments.method, arguments.keep, progress)
    judge = Judge(trained.model, trained.found, trained.layout, blocks.__getitem__)
    contenders = [c for c in CONTENDERS if not arguments.only or c.name in (FULL, *arguments.only)]
    contenders.sort(key=lambda contender: contender.name != FULL)  # the others are put beside it
    for signals in arguments.signals:
        texts: dict[str, Seen] = {text: see(trained, text, signals, rows) for text in trained.texts}
        for counted in arguments.bytes:
            contest = Contest(judge, made.policy, plan_table(trained.layout, counted), texts)
            task = progress.add_task(f"{folder.name}: {signals}, {counted} bytes", total=len(contenders))
            suffix = f"-{arguments.method.replace(', ', '-').replace(' ', '-')}-{signals}"
            path = arguments.out / f"policies-{folder.name}{suffix}{'-true-bytes' * (counted == 'true')}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            settings = {"method": arguments.method, "bytes": counted, "signals": signals, "budgets": arguments.budgets}
            record = {
                "settings": settings_of(arguments, folder) | settings,
                "machine": machine(arguments.device),
                "command": "python -m bench.policies " + " ".join(sys.argv[1:]),
                "policy": {name: np.asarray(getattr(made.policy, name)).tolist() for name in POLICY_FIELDS},
                "calibration": made.report(),
                "cells": {},
            }
            for contender in contenders:
                record["cells"][contender.name] = {
                    str(budget): measure(trained, contest, contender, budget)
                    for budget in contender.budgets or arguments.budgets
                }
                path.write_text(json.dumps(record) + "\n", encoding="utf-8")
                progress.advance(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--method", default="best", choices=list(METHODS), help="how linear-blocks are quantized")
    parser.add_argument(
        "--bytes", nargs="*", default=["code"], choices=("code", "true"), help="whether budgets count 16-bit tables"
    )
    parser.add_argument(
        "--signals", nargs="*", default=list(SIGNALS), choices=SIGNALS, help="what live policies plan from"
    )
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGET_BITS), help="in mean code bits")
    parser.add_argument("--only", nargs="*", metavar="POLICY", help="measure these policies alone")
    arguments = parser.parse_args()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        for folder in arguments.models:
            run(folder, arguments, progress)
    text = report([json.loads(path.read_text()) for path in sorted(arguments.out.glob("policies-*.json"))])
    (arguments.out / "policies.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
