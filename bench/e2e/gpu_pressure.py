"""Decoding at a model's true shape while its KV cache takes the weights' bytes, down to 3 bits and back.

    python -m bench.e2e.gpu_pressure --model qwen --layers 24 --batch 64 --out bench/results/h200-pressure-qwen.json

1. Moving: 6 bits and --spare-mib of KV cache in a fixed budget. A batch decodes until not one more token fits; then the
   sequences end, and a small batch decodes on while the pages come back.
2. Still: the same forwards over as much KV cache in a larger budget, each stretch held at the widths that the moving
   run had in its middle, with nothing moving. The difference in time is what moving costs.
3. Capacity: tokens of KV cache that fit the budget beside bf16 experts, beside each uniform width, and as reached.
Weights are random (bench/e2e/drawn.py). Every forward is timed by events on the device's own clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
import triton
from transformers import PreTrainedModel

from bench.e2e.decoding import Decoding, Mark
from bench.e2e.drawn import Drawn, draw
from pagedweight import RuntimeConfig
from pagedweight.runtime.controller_report import RuntimeSnapshot

WIDTHS = (3, 4, 5, 6)
BUFFER_BYTES = 2**30
STRETCH_STEPS = 16
SETTLING_STEPS = 3  # of a stretch: the first forwards after a wait start on an idle device
RESTORE_BATCH, RESTORE_STEPS = 8, 160
WORKSPACE_BYTES = 2 * 2**30


class Moving(NamedTuple):
    """What the moving run leaves for the still one. milliseconds: (steps,). bits: (steps, R)."""

    report: dict
    milliseconds: np.ndarray
    bits: np.ndarray
    restore_milliseconds: np.ndarray
    restore_bits: np.ndarray


def moving(drawn: Drawn, config: RuntimeConfig, batch: int, prompt_tokens: int, most_steps: int) -> Moving:
    model = drawn.patched(config)
    runtime = model.pagedweight
    warm_up(model, batch, prompt_tokens)
    start = runtime.snapshot()
    decoding = Decoding(model, batch, prompt_tokens)
    steps = decoding.run(most_steps)
    took, end = decoding.milliseconds(), runtime.snapshot()
    tokens = decoding.cache.get_seq_length()
    decoding.cache.release()
    restoring = Decoding(model, RESTORE_BATCH, prompt_tokens)
    restoring.run(RESTORE_STEPS)
    restored_took, rested = restoring.milliseconds(), runtime.snapshot()
    restoring.cache.release()
    runtime.check()
    bits, restore_bits = (np.stack([seen.bits for seen in run.seen]) for run in (decoding, restoring))
    back = int((restore_bits.mean(1) < rested.bits.mean()).sum())
    report = {
        "batch": batch,
        "steps": steps,
        "tokens_per_sequence": tokens,
        "filled": steps < most_steps,
        "bits": [start.mean_bits, end.mean_bits, rested.mean_bits],
        "kv_bytes": end.kv_bytes,
        "weight_bytes": [start.weight_bytes, end.weight_bytes, rested.weight_bytes],
        "released_bytes": end.moves.released_bytes - start.moves.released_bytes,
        "released_share_in_kv_blocks": usable_share(start, end),
        "restored_bytes": rested.moves.loaded_bytes - end.moves.loaded_bytes,
        "restore_steps": back,
        "reload_gigabytes_per_second": reload_rate(end, rested) / 1e9,
        "stalled_ms": 1e3 * (end.moves.stalled_seconds - start.moves.stalled_seconds),
        "relocated_bytes": rested.moves.relocated_bytes - start.moves.relocated_bytes,
        "longest_step_ms": float(took.max()),
        "median_step_ms": float(np.median(took)),
        "longest_restoring_step_ms": float(restored_took.max()),
        "reserved_bytes_spread": int(np.ptp(decoding.reserved or [0])),
        "over_time": over_time(decoding, took),
        "restoring": over_time(restoring, restored_took)[:24],
    }
    return Moving(report, took, bits, restored_took, restore_bits)


def warm_up(model: PreTrainedModel, batch: int, prompt_tokens: int) -> None:
    """Compile what both batch sizes need, then wait until every width is back at its start."""
    for size in (batch, RESTORE_BATCH):
        decoding = Decoding(model, size, prompt_tokens)
        decoding.run(2 * SETTLING_STEPS)
        decoding.cache.release()
    if model.device.type == "cuda":
        # What attention gathers of one layer grows with the cache; taken once, the driver sees no growth.
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=model.device)
        torch.cuda.synchronize()
    for _ in range(64):
        model.pagedweight.boundary()
        time.sleep(2e-3)


def usable_share(start: RuntimeSnapshot, end: RuntimeSnapshot) -> float:
    """Whole KV blocks, held or free, gained between two moments, over the bytes released between them."""
    released = end.moves.released_bytes - start.moves.released_bytes
    held = [(seen.kv_bytes + seen.bytes_by_owner["free"]) // start.kv.block_bytes for seen in (start, end)]
    return (held[1] - held[0]) * start.kv.block_bytes / max(1, released)


def reload_rate(start: RuntimeSnapshot, end: RuntimeSnapshot) -> float:
    """Bytes/s of the loads that landed between two moments."""
    seconds = end.moves.loading_seconds - start.moves.loading_seconds
    return (end.moves.loaded_bytes - start.moves.loaded_bytes) / max(1e-9, seconds)


def over_time(decoding: Decoding, took: np.ndarray) -> list[dict]:
    """One row for each stretch: tokens/s, mean bits and bytes."""
    rows = []
    for first in range(0, len(took), STRETCH_STEPS):
        seen, part = decoding.seen[first], took[first : first + STRETCH_STEPS]
        rows.append(
            {
                "step": first,
                "tokens_per_second": float(1e3 * decoding.batch * len(part) / part.sum()),
                "longest_ms": float(part.max()),
                "bits": seen.mean_bits,
                "kv_mib": seen.kv_bytes >> 20,
                "weight_mib": seen.weight_bytes >> 20,
                "free_mib": seen.bytes_by_owner["free"] >> 20,
            }
        )
    return rows


def still(
    drawn: Drawn, config: RuntimeConfig, moved: Moving, batch: int, prompt_tokens: int, stretch_steps: int
) -> dict:
    """The moving run's forwards with nothing moving, and what moving has cost."""
    model = drawn.patched(config)
    decoding, compared = Decoding(model, batch, prompt_tokens), []
    for first in range(0, len(moved.bits) - stretch_steps + 1, stretch_steps):
        with model.pagedweight.held_at(moved.bits[first + stretch_steps // 2]):
            decoding.run(stretch_steps)
            took = decoding.milliseconds()[-stretch_steps:]
        compared.append((first, took))
    decoding.cache.release()
    parts = slice(SETTLING_STEPS, stretch_steps - 1)
    with_moves = np.concatenate([moved.milliseconds[first : first + stretch_steps][parts] for first, _ in compared])
    without = np.concatenate([took[parts] for _, took in compared])
    return {
        "steps": len(without),
        "mean_ms": [float(with_moves.mean()), float(without.mean())],
        "median_ms": [float(np.median(with_moves)), float(np.median(without))],
        "slowdown": float(with_moves.sum() / without.sum() - 1),
        "longest_ms": [float(with_moves.max()), float(without.max())],
        **still_while_restoring(model, moved, prompt_tokens),
    }


def still_while_restoring(model: PreTrainedModel, moved: Moving, prompt_tokens: int) -> dict:
    """The same for steps in which pages came back: a few forwards at each one's widths, the median of them."""
    came_back = np.flatnonzero((moved.restore_bits[1:] != moved.restore_bits[:-1]).any(1))
    last = int(came_back[-1]) + 2 if len(came_back) else 0
    sampled = np.unique(np.linspace(0, max(0, last - 1), min(last, 8)).astype(int))
    without = []
    for bits in moved.restore_bits[sampled]:
        with model.pagedweight.held_at(bits):
            decoding = Decoding(model, RESTORE_BATCH, prompt_tokens)
            decoding.run(2 * SETTLING_STEPS)
            without.append(float(np.median(decoding.milliseconds()[SETTLING_STEPS:-1])))
            decoding.cache.release()
    with_moves = moved.restore_milliseconds[sampled]
    return {
        "restoring_steps": last,
        "restoring_ms": [float(with_moves.sum()), float(np.sum(without))],
        "restoring_slowdown": float(with_moves.sum() / max(1e-9, np.sum(without)) - 1),
    }


def capacity(drawn: Drawn, budget_bytes: int, reached_tokens: int) -> list[dict]:
    """Tokens of KV cache beside the experts in one budget."""
    token_bytes = sum(shape.token_bytes for pair in drawn.kv_layers if pair is not None for shape in pair)
    held = {"bf16": drawn.dense_bytes, **{f"uniform {b}": size for b, size in drawn.resident_bytes().items()}}
    rows = [
        {"experts": name, "weight_bytes": size, "tokens": max(0, budget_bytes - size) // token_bytes}
        for name, size in held.items()
    ]
    return [*rows, {"experts": "this, 6 bits while there is room", "tokens": reached_tokens}]


def plain_rate(host: torch.Tensor, device: torch.device) -> float | None:
    """GB/s of one large copy from page-locked memory: what the bus gives."""
    if device.type != "cuda":
        return None
    target = torch.empty_like(host, device=device)
    target.copy_(host, non_blocking=True)
    start = Mark(device)
    for _ in range(3):
        target.copy_(host, non_blocking=True)
    end = Mark(device)
    torch.cuda.synchronize()
    return 3 * host.numel() / start.ms_until(end) / 1e6


def note(results: dict, name: str, part: object, out: Path) -> None:
    """Print a part as soon as it is there, and write all so far: a run that is cut off leaves what it has."""
    results[name] = part
    print(json.dumps({name: part}), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--spare-mib", type=int, default=1024)
    parser.add_argument("--most-steps", type=int, default=4096)
    parser.add_argument(
        "--stretch", type=int, default=STRETCH_STEPS, help="steps of the still run at one set of widths"
    )
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    # cuDNN's attention keeps a plan for each shape, and a growing cache has a new one at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    gc.disable()
    drawn = draw(options.model, options.layers, WIDTHS, options.device, BUFFER_BYTES if options.device == "cuda" else 0)
    resident = drawn.resident_bytes()
    budget = resident[WIDTHS[-1]] + options.spare_mib * 2**20
    thresholds = {"offload_free_blocks": 2 * options.batch, "reload_free_blocks": 3 * options.batch}
    config = RuntimeConfig(budget_bytes=budget, **thresholds)
    rate = plain_rate(drawn.store.host.page_locked, drawn.model.device)
    facts = {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": [torch.__version__, triton.__version__, transformers.__version__],
        "command": " ".join(["python -m bench.e2e.gpu_pressure", *sys.argv[1:]]),
        "budget_bytes": budget,
        "resident_bytes": resident,
        "plain_gigabytes_per_second": rate,
    }
    print(json.dumps(facts), flush=True)
    results = dict(facts)
    moved = moving(drawn, config, options.batch, options.prompt, options.most_steps)
    note(results, "moving", moved.report, options.out)
    tokens = options.batch * moved.report["tokens_per_sequence"]
    note(results, "capacity", capacity(drawn, budget, tokens), options.out)
    larger = RuntimeConfig(budget_bytes=budget + resident[WIDTHS[-1]], **thresholds)
    unmoved = still(drawn, larger, moved, options.batch, options.prompt, options.stretch)
    note(results, "still", unmoved, options.out)
    return 0 if moved.report["filled"] else 1


if __name__ == "__main__":
    sys.exit(main())
