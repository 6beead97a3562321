"""Quality while a growing KV cache takes the weights' bytes, beside uniform widths with the same peak memory.

    python -m bench.e2e.dynamic CHECKPOINT --reference MODEL --task wikitext2=test.txt --task qmsum=qmsum.jsonl \\
        --out bench/results/dynamic-<model>.json

For each uniform width: a batch of long prompts is read through a cache and answered, and the most bytes that weights
and cache held together become the budget. In that budget the same batch is read again from as many bits as fit an empty
cache, which its growth then takes away. Loss, KL to the unquantized model and agreement of the likeliest token are of
the tokens after each prompt: those of a text, or a gold answer's. One cell after another is written to --out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from bench.quality_parts import bootstrap_ratio
from pagedweight import RuntimeConfig
from pagedweight.calibration.divergence import Divergence, Reference, head_logits, window_divergence
from pagedweight.evaluation.items import Items, Size
from pagedweight.evaluation.record import Record
from pagedweight.evaluation.run import Plan, figures, read_tasks, take_references
from pagedweight.runtime.controller_report import RuntimeSnapshot
from pagedweight.saving import load

AMPLE_BYTES = 2**30
FREE_BLOCKS = {"offload_free_blocks": 1, "reload_free_blocks": 3}


class Reading(NamedTuple):
    """Of one batch of prompts: figures of each, and the runtime after every forward."""

    found: list[tuple[float, float, float]]
    seen: list[RuntimeSnapshot]


def read_batch(model: PreTrainedModel, items: Items, reference: Reference, rows: slice, chunk_tokens: int) -> Reading:
    """Prompts and answers a chunk at a time through one cache in the arena."""
    runtime, device = model.pagedweight, model.device
    tokens, mask = (tensor[rows].to(device) for tensor in items.windows[:2])
    cache, logits, seen = runtime.new_cache(), [], []
    for start in range(0, tokens.shape[1], chunk_tokens):
        stop = min(start + chunk_tokens, tokens.shape[1])
        with torch.no_grad():
            given = {"attention_mask": mask[:, :stop].long(), "past_key_values": cache, "use_cache": True}
            logits.append(model(input_ids=tokens[:, start:stop], **given).logits.float())
        seen.append(runtime.snapshot())
    cache.release()
    runtime.boundary()
    expected = head_logits(model, reference.hidden[rows].to(device))
    at = items.scored[rows].roll(-1, 1).to(device)
    each = zip(tokens, mask, at, torch.cat(logits, 1), expected, strict=True)
    return Reading([window_divergence(*row) for row in each], seen)


def peak_bytes(seen: Sequence[RuntimeSnapshot]) -> int:
    return max(now.weight_bytes + now.kv_bytes for now in seen)


def cell_of(items: Items, readings: list[Reading], chunk_tokens: int, budget_bytes: int | None) -> dict:
    """Figures of every item, and widths and bytes by tokens read, of the batch that held most."""
    found = Divergence(*np.array([row for reading in readings for row in reading.found]).T)
    widest = max(readings, key=lambda reading: peak_bytes(reading.seen))
    return {
        **figures(found, items),
        "peak_bytes": peak_bytes(widest.seen),
        "budget_bytes": budget_bytes,
        "bits": [float(np.mean([r.seen[at].mean_bits for r in readings])) for at in (0, -1)],
        "over_tokens": [
            [chunk_tokens * (at + 1), round(now.mean_bits, 3), now.weight_bytes, now.kv_bytes]
            for at, now in enumerate(widest.seen)
        ],
    }


class Run:
    """One checkpoint; a model for each budget."""

    def __init__(self, plan: Plan, batch: int, chunk_tokens: int, record: Record) -> None:
        self.plan, self.batch, self.chunk_tokens, self.record = plan, batch, chunk_tokens, record
        self.tasks = read_tasks(plan)
        self.references = take_references(plan, self.tasks, record, lambda step, done, total: None)

    def model(self, budget_bytes: int) -> PreTrainedModel:
        config = RuntimeConfig(budget_bytes=budget_bytes, deterministic=True, block_tokens=4, **FREE_BLOCKS)
        return load(self.plan.checkpoint, config=config, **self.plan.on).eval()

    def readings(self, model: PreTrainedModel, task: str) -> list[Reading]:
        items, count = self.tasks[task], len(self.tasks[task].scored)
        parts = [slice(first, min(count, first + self.batch)) for first in range(0, count, self.batch)]
        return [read_batch(model, items, self.references[task], rows, self.chunk_tokens) for rows in parts]

    def uniform(self, width: int, task: str) -> dict:
        model = self.model(AMPLE_BYTES)
        with model.pagedweight.held_at(width):
            cell = cell_of(self.tasks[task], self.readings(model, task), self.chunk_tokens, None)
        model.pagedweight.close()
        return cell

    def dynamic(self, budget_bytes: int, task: str) -> dict:
        model = self.model(budget_bytes)
        cell = cell_of(self.tasks[task], self.readings(model, task), self.chunk_tokens, budget_bytes)
        model.pagedweight.check()
        model.pagedweight.close()
        return cell


def measure(run: Run, widths: Sequence[int], progress: Progress) -> None:
    record, task_bar = run.record, progress.add_task("cells", total=2 * len(widths) * len(run.tasks))
    for width in widths:
        for task in run.tasks:
            if not record.has("uniform", str(width), task):
                record.put(run.uniform(width, task), "uniform", str(width), task)
            progress.advance(task_bar)
            if not record.has("dynamic", str(width), task):
                budget = record.content["cells"]["uniform"][str(width)][task]["peak_bytes"]
                record.put(run.dynamic(budget, task), "dynamic", str(width), task)
            progress.advance(task_bar)


def lines(content: dict) -> list[str]:
    """A row for each task and width: both peaks, bits at the first and last chunk, KL of both and their ratio."""
    rows = []
    for width, tasks in content["cells"]["uniform"].items():
        for task, uniform in tasks.items():
            moving = content["cells"]["dynamic"][width][task]
            kl = [np.array(cell["kl"]) for cell in (uniform, moving)]
            low, high = bootstrap_ratio(kl[1], kl[0])
            rows.append(
                f"{task:>12} {width} bits: {uniform['peak_bytes'] / 1e6:.2f} MB, {moving['peak_bytes'] / 1e6:.2f} MB; "
                f"{moving['bits'][0]:.2f} to {moving['bits'][1]:.2f} bits; KL {1e3 * kl[0].mean():.3f}, "
                f"{1e3 * kl[1].mean():.3f}: {kl[1].mean() / kl[0].mean():.3f} ({low:.3f} to {high:.3f}); "
                f"loss {np.mean(uniform['loss']):.4f}, {np.mean(moving['loss']):.4f}"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder that quantize wrote, with a calibrated policy")
    parser.add_argument("--reference", required=True, help="the unquantized model")
    parser.add_argument("--task", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--widths", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="sequences that share one budget")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of each sequence in one forward")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tasks = {name: Path(path) for name, _, path in (one.partition("=") for one in options.task)}
    size, place = Size(options.length, options.count), {"device": options.device, "dtype": "float32"}
    plan = Plan(options.checkpoint, tasks, (), (), options.reference, size, **place)
    settings = plan.settings() | {"batch": options.batch, "chunk": options.chunk}
    record = Record(options.out, settings, plan.on["device_map"], "python -m bench.e2e.dynamic")
    with Progress() as progress:
        measure(Run(plan, options.batch, options.chunk, record), options.widths, progress)
    print(*lines(record.content), sep="\n")


if __name__ == "__main__":
    main()
