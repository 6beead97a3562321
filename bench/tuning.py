"""What tuning tables on the whole model's answers gives, by calibration windows, at uniform widths and in mixed plans.

    python -m bench.tuning MODEL --calibration c4_train.txt wikipedia.txt --text WikiText-2=test.txt \\
        --text C4=c4.jsonl --counts 64 256 1024 --out bench/results

Every count of windows tunes the tables of level best anew, with codes that do not change; KL is beside the same
linear-blocks with tables not tuned. Writes tuning-<model>.json after every count.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from bench.quality_damage import PLAN_MEAN_BITS, random_plans
from bench.quality_judge import Answers, Judge, take_answers
from bench.quality_keep import Kept
from bench.quality_parts import (
    WIDTHS,
    Trained,
    add_arguments,
    bootstrap_ratio,
    command,
    load,
    machine,
    rows_per_forward,
    settings_of,
)
from pagedweight.calibration.tuning import TUNED_WIDTHS, TuningOptions, tune_tables
from pagedweight.layout import BlockId, PackedBlock

UNTUNED = "best, tables not tuned"


def tuned(trained: Trained, blocks: dict[BlockId, PackedBlock], count: int) -> dict[BlockId, PackedBlock]:
    """The linear-blocks with tables tuned on the first `count` calibration windows."""
    windows = trained.calibration.first(count)
    tables = tune_tables(trained.model, trained.found, trained.layout, blocks.__getitem__, windows)
    moved = {block: {b: own[block].to(trained.device) for b, own in tables.items()} for block in blocks}
    return {block: packed._replace(tables=packed.tables | moved[block]) for block, packed in blocks.items()}


def measure(judge: Judge, answers: list[Answers], plans: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """By kind of plan, KL in nats of every window, the mean over the kind's plans."""
    return {
        kind: np.mean([np.concatenate([judge.figures(given, plan).kl for given in answers]) for plan in own], axis=0)
        for kind, own in plans.items()
    }


def plans_of(trained: Trained, count: int) -> dict[str, list[np.ndarray]]:
    """Width indices of every row: each tuned width everywhere, and random plans of all widths."""
    rows = trained.layout.rows
    uniform = {f"{bits} bits": [np.full(rows, WIDTHS.index(bits))] for bits in TUNED_WIDTHS}
    drawn = random_plans(trained.layout, count, PLAN_MEAN_BITS, seed=0)
    return uniform | {f"{count} plans of {PLAN_MEAN_BITS} bits": [np.searchsorted(WIDTHS, plan) for plan in drawn]}


def run(folder: Path, arguments: argparse.Namespace, progress: Progress) -> None:
    trained = load(folder, arguments)
    keep = Kept.of(trained, arguments.keep)
    answers = [take_answers(trained.model, text, rows=rows_per_forward(arguments)) for text in trained.texts.values()]
    blocks = keep.blocks(UNTUNED, keep.statistics())
    plans = plans_of(trained, arguments.plans)
    record: dict[str, Any] = {
        "settings": settings_of(arguments, folder) | {"options": TuningOptions()._asdict()},
        "machine": machine(arguments.device),
        "command": command("bench.tuning"),
        "beside_untuned": {},
    }
    before = measure(_judge(trained, blocks), answers, plans)
    task = progress.add_task(f"{folder.name}: tune", total=len(arguments.counts))
    for count in arguments.counts:
        began = time.monotonic()
        made = tuned(trained, blocks, count)
        seconds = time.monotonic() - began
        after = measure(_judge(trained, made), answers, plans)
        found = {
            kind: [kl.mean() / before[kind].mean(), *bootstrap_ratio(kl, before[kind])] for kind, kl in after.items()
        }
        record["beside_untuned"][str(count)] = {
            "seconds": round(seconds, 1),
            **{kind: [round(float(value), 4) for value in values] for kind, values in found.items()},
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"tuning-{folder.name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        progress.advance(task)
        print(folder.name, count, "windows", record["beside_untuned"][str(count)], flush=True)


def _judge(trained: Trained, blocks: dict[BlockId, PackedBlock]) -> Judge:
    return Judge(trained.model, trained.found, trained.layout, blocks.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 256, 1024], help="calibration windows to tune on")
    parser.add_argument("--plans", type=int, default=8, help="random mixed-width plans to judge")
    arguments = parser.parse_args()
    with Progress() as progress:
        for folder in arguments.models:
            run(folder, arguments, progress)


if __name__ == "__main__":
    main()
