"""Compares the planner with other policies and with its own ablations at the same bytes, on trained models.

    python -m bench.policies MODEL [MODEL ...] --calibration c4_train.txt --text WikiText-2=test.txt \\
        --text C4=c4.jsonl --out bench/results

Dequantized weights of the widths that a policy chooses stand in for the experts', so kernels do not matter. Policies
that look at routing or prompts plan anew for each window, from its first half (KL is taken of the second) or, with
--signals window, from all of it. Writes policies-<model>[...].json, and policies.md from all of the folder's.
--contest settings puts settings of the planner beside each other instead, to be chosen on other windows (--skip).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from bench.policies_energies import Energies
from bench.policies_parts import Contest, Seen, see
from bench.policies_plans import BF16, BUDGET_BITS, CONTESTS, FULL, Contender, held_bytes, mean_bits, plan_table
from bench.policies_report import report
from bench.quality_judge import Judge
from bench.quality_keep import Kept, method_slug
from bench.quality_parts import (
    METHODS,
    Trained,
    add_arguments,
    code_bytes,
    command,
    load,
    machine,
    rounded,
    rows_per_forward,
    settings_of,
)
from pagedweight.calibration.pipeline import Options

SIGNALS = ("past", "window")
POLICY_FIELDS = ("mass_trust", "alpha", "bucket_edges", "multipliers", "floors", "depth_caps")


def counter(name: str, progress: Progress) -> Callable[[str, int, int], None]:
    """A bar for each step of calibration."""
    tasks: dict[str, TaskID] = {}

    def note(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = progress.add_task(f"{name}: {step}", total=total)
        progress.update(tasks[step], completed=done)

    return note


def resumed(path: Path, record: dict[str, object]) -> dict[str, object]:
    """The record, with what an earlier run under the same settings and policy has measured."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    same = all(old.get(name) == record[name] for name in ("settings", "policy", "machine"))
    return record | {"cells": old["cells"]} if same else record


def measure(trained: Trained, contest: Contest, contender: Contender, budget: float) -> dict[str, dict[str, list]]:
    """By text and figure, one value per window. Means over windows: bits, code_bytes of planes, true_bytes as the
    runtime holds them."""
    cell, held = {}, plan_table(trained.layout, "true")
    for text, seen in contest.texts.items():
        bits = contest.plans(contender, budget, text)
        figures = {name: rounded(values) for name, values in contest.figures(seen, bits).items()}
        figures["bits"] = rounded([np.mean([mean_bits(trained.layout, plan) for plan in bits])])
        figures["code_bytes"] = rounded([np.mean([code_bytes(trained.layout, plan) for plan in bits])])
        on_device = [np.full_like(plan, plan.max()) if contender.holds_both else plan for plan in bits]
        figures["true_bytes"] = (
            figures["code_bytes"]
            if contender.name == BF16
            else rounded([np.mean([held_bytes(held, plan) for plan in on_device])])
        )
        cell[text] = figures
    return cell


def without_first(trained: Trained, skip: int) -> Trained:
    """The held-out texts without their first windows."""
    texts = {
        name: text._replace(tokens=text.tokens[skip:], mask=text.mask[skip:]) for name, text in trained.texts.items()
    }
    return trained._replace(texts=texts)


def run(folder: Path, arguments: argparse.Namespace, progress: Progress) -> None:
    cut = argparse.Namespace(**{**vars(arguments), "windows": arguments.windows + arguments.skip})
    trained = without_first(load(folder, cut), arguments.skip)
    rows = rows_per_forward(arguments)
    keep = Kept.of(trained, arguments.keep)
    statistics = keep.statistics()
    blocks = keep.blocks(arguments.method, statistics)
    options = Options(gain_windows=arguments.gain_windows, search_windows=arguments.search_windows)
    policy, calibration = keep.policy(arguments.method, blocks, statistics, options, counter(folder.name, progress))
    energies = cache(lambda: Energies.of(trained, statistics, blocks, calibration))
    judge = Judge(trained.model, trained.found, trained.layout, blocks.__getitem__)
    contenders = [c for c in CONTESTS[arguments.contest] if not arguments.only or c.name in (FULL, *arguments.only)]
    contenders.sort(key=lambda contender: contender.name != FULL)  # the others are put beside it
    for signals in arguments.signals:
        texts: dict[str, Seen] = {text: see(trained, text, signals, rows) for text in trained.texts}

        @cache
        def factors(text: str) -> np.ndarray:
            return energies().factors(texts[text].windows, policy)  # noqa: B023

        for counted in arguments.bytes:
            contest = Contest(judge, policy, plan_table(trained.layout, counted), texts, factors)
            task = progress.add_task(f"{folder.name}: {signals}, {counted} bytes", total=len(contenders))
            suffix = f"-{method_slug(arguments.method)}-{signals}"
            suffix += "-true-bytes" * (counted == "true")
            path = arguments.out / f"{arguments.contest}-{folder.name}{suffix}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            settings = {"method": arguments.method, "bytes": counted, "signals": signals, "budgets": arguments.budgets}
            settings |= {"skip": arguments.skip} if arguments.skip else {}
            record = {
                "settings": settings_of(arguments, folder) | settings,
                "machine": machine(arguments.device),
                "command": command("bench.policies"),
                "policy": {name: np.asarray(getattr(policy, name)).tolist() for name in POLICY_FIELDS},
                "calibration": calibration,
                "cells": {},
            }
            record = resumed(path, record)
            for contender in contenders:
                if contender.name not in record["cells"]:
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
    parser.add_argument("--contest", default="policies", choices=tuple(CONTESTS), help="who is measured")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many windows at the start of each text")
    defaults = Options()
    parser.add_argument("--gain-windows", type=int, default=defaults.gain_windows, help="0 leaves the step out")
    parser.add_argument("--search-windows", type=int, default=defaults.search_windows, help="0 leaves the search out")
    parser.add_argument("--only", nargs="*", metavar="POLICY", help="measure these policies alone")
    arguments = parser.parse_args()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        for folder in arguments.models:
            run(folder, arguments, progress)
    records = [json.loads(path.read_text()) for path in sorted(arguments.out.glob(f"{arguments.contest}-*.json"))]
    text = report(records)
    (arguments.out / f"{arguments.contest}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
