"""Decoding at a model's true shape while its KV cache takes the weights' bytes, down to 3 bits and back.

    python -m bench.e2e.gpu_pressure --model qwen --layers 24 --batch 64 --out bench/results/h200-pressure-qwen.json

1. Moving: 6 bits and --spare-mib of KV cache in a fixed budget. A batch decodes until not one more token fits; then the
   sequences end, and a small batch decodes on while pages come back; what is still away then comes back between two
   forwards.
2. Still: the same forwards over as much KV cache in a larger budget, each stretch held at the widths that the moving
   run had in its middle, with nothing moving. The difference in time is what moving costs.
Weights are random (bench/e2e/drawn.py). Every forward is timed by events on the device's own clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
import triton
from transformers import PreTrainedModel

from bench.e2e.decoding import Decoding, Mark
from bench.e2e.drawn import Drawn, draw
from bench.e2e.pressure_run import (
    RESTORE_BATCH,
    SETTLING_STEPS,
    STRETCH_STEPS,
    Run,
    TimedBoundary,
    come_back,
    over_time,
    reload_rate,
    run_of,
    serve_until,
    spread,
    usable_share,
    warm_up,
)
from pagedweight import RuntimeConfig

WIDTHS = (3, 4, 5, 6)
BUFFER_BYTES = 2**30


def moving(
    drawn: Drawn, config: RuntimeConfig, batch: int, prompt_tokens: int, most_steps: int
) -> tuple[dict, Run, Run]:
    """What happened, and the steps while the cache grew and while the pages came back."""
    model = drawn.patched(config)
    runtime = model.pagedweight
    warm_up(model, batch, prompt_tokens)
    timed, start = TimedBoundary(model), runtime.snapshot()
    decoding = Decoding(model, batch, prompt_tokens)
    timed.milliseconds.clear()
    steps, began = 0, time.perf_counter()
    while steps < most_steps and (done := decoding.run(min(64, most_steps - steps))):
        steps += done
        print(steps, f"{time.perf_counter() - began:.1f} s", decoding.seen[-1].mean_bits, "bits", flush=True)
    filling, end = run_of(decoding, timed), runtime.snapshot()
    tokens = decoding.cache.get_seq_length()
    decoding.cache.release()
    restoring, back, rested = serve_until(model, timed, prompt_tokens, start.mean_bits)
    timed.take_off(model)
    boundaries, seconds = come_back(model, start.mean_bits)
    whole = runtime.snapshot()
    runtime.check()
    report = {
        "batch": batch,
        "restore_batch": RESTORE_BATCH,
        "steps": steps,
        "tokens_per_sequence": tokens,
        "filled": steps < most_steps,
        "bits": [start.mean_bits, end.mean_bits, rested.mean_bits, whole.mean_bits],
        "kv_bytes": end.kv_bytes,
        "weight_bytes": [start.weight_bytes, end.weight_bytes, rested.weight_bytes, whole.weight_bytes],
        "released_bytes": end.moves.released_bytes - start.moves.released_bytes,
        "released_share_in_kv_blocks": usable_share(start, end),
        "restored_bytes": [seen.moves.loaded_bytes - end.moves.loaded_bytes for seen in (rested, whole)],
        "restore_steps": len(back.milliseconds),
        "boundaries_without_forwards": boundaries,
        "seconds_without_forwards": seconds,
        "reload_gigabytes_per_second": reload_rate(end, whole) / 1e9,
        "stalled_ms": 1e3 * (end.moves.stalled_seconds - start.moves.stalled_seconds),
        "relocated_bytes": rested.moves.relocated_bytes - start.moves.relocated_bytes,
        "longest_step_ms": float(filling.milliseconds.max()),
        "median_step_ms": float(np.median(filling.milliseconds)),
        "longest_restoring_step_ms": float(back.milliseconds.max()),
        "median_restoring_step_ms": float(np.median(back.milliseconds)),
        "boundary_share": [float(run.boundary_ms.sum() / run.milliseconds.sum()) for run in (filling, back)],
        "longest_boundary_ms": [float(run.boundary_ms.max()) for run in (filling, back)],
        "reserved_bytes_spread": spread([*decoding.reserved, *restoring.reserved]),
        "driver_free_bytes_spread": spread([*decoding.driver_free, *restoring.driver_free]),
        "over_time": over_time(decoding, filling),
        "restoring": over_time(restoring, back),
    }
    return report, filling, back


def restoring_alone(drawn: Drawn, config: RuntimeConfig, prompt_tokens: int) -> dict:
    """From 3 bits with nothing but a small batch in the cache."""
    model = drawn.patched(config)
    runtime = model.pagedweight
    warm_up(model, RESTORE_BATCH, prompt_tokens)
    bits = runtime.snapshot().mean_bits
    runtime.set_bits(WIDTHS[0])
    timed, end = TimedBoundary(model), runtime.snapshot()
    restoring, back, rested = serve_until(model, timed, prompt_tokens, bits)
    timed.take_off(model)
    runtime.check()
    return {
        "restore_batch": RESTORE_BATCH,
        "bits": [end.mean_bits, rested.mean_bits, bits],
        "restored_bytes": rested.moves.loaded_bytes - end.moves.loaded_bytes,
        "restore_steps": len(back.milliseconds),
        "reload_gigabytes_per_second": reload_rate(end, rested) / 1e9,
        "longest_restoring_step_ms": float(back.milliseconds.max()),
        "median_restoring_step_ms": float(np.median(back.milliseconds)),
        "boundary_share": float(back.boundary_ms.sum() / back.milliseconds.sum()),
        "longest_boundary_ms": float(back.boundary_ms.max()),
        "restoring": over_time(restoring, back),
    }


def still(model: PreTrainedModel, run: Run, prompt_tokens: int, stretch_steps: int, every: int) -> dict:
    """The run's forwards again with nothing moving, of every so many stretches one, and what moving has cost."""
    decoding, compared = Decoding(model, run.batch, prompt_tokens), []
    stretches = range(0, len(run.milliseconds) - stretch_steps + 1, stretch_steps)
    for number, first in enumerate(stretches):
        if number % every:
            decoding.skip(stretch_steps)
            continue
        with model.pagedweight.held_at(run.bits[first + stretch_steps // 2]):
            decoding.run(stretch_steps)
            compared.append((first, decoding.milliseconds()[-stretch_steps:]))
    decoding.cache.release()
    parts = slice(SETTLING_STEPS, stretch_steps - 1)
    moved = [run.milliseconds[first : first + stretch_steps][parts] for first, _ in compared]
    held = [took[parts] for _, took in compared]
    with_moves, without = np.concatenate(moved), np.concatenate(held)
    slowdowns = [float(a.sum() / b.sum() - 1) for a, b in zip(moved, held, strict=True)]
    return {
        "steps": len(without),
        "mean_ms": [float(with_moves.mean()), float(without.mean())],
        "median_ms": [float(np.median(with_moves)), float(np.median(without))],
        "slowdown": float(with_moves.sum() / without.sum() - 1),
        "median_slowdown_of_stretches": float(np.median(slowdowns)),
        "slowdown_of_stretches": slowdowns,
        "longest_ms": [float(with_moves.max()), float(without.max())],
    }


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
    parser.add_argument("--stretch", type=int, default=32, help="steps of the still run at one set of widths")
    parser.add_argument("--every", type=int, default=1, help="of so many stretches one is compared")
    parser.add_argument("--restoring-alone", action="store_true", help="only pages that come back, from 3 bits")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    # cuDNN's attention keeps a plan for each shape, and a growing cache has a new one at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    gc.disable()
    began = time.perf_counter()
    drawn = draw(options.model, options.layers, WIDTHS, options.device, BUFFER_BYTES if options.device == "cuda" else 0)
    resident = drawn.resident_bytes()
    budget = resident[WIDTHS[-1]] + options.spare_mib * 2**20
    thresholds = {"offload_free_blocks": 2 * options.batch, "reload_free_blocks": 3 * options.batch}
    facts = {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": [torch.__version__, triton.__version__, transformers.__version__],
        "command": " ".join(["python -m bench.e2e.gpu_pressure", *sys.argv[1:]]),
        "widths": WIDTHS,
        "layers": options.layers,
        "budget_bytes": budget,
        "resident_bytes": resident,
        "plain_gigabytes_per_second": plain_rate(drawn.store.host.page_locked, drawn.model.device),
    }
    print(json.dumps(facts), flush=True)
    results = dict(facts)
    config = RuntimeConfig(budget_bytes=budget, **thresholds)
    print(f"drawn after {time.perf_counter() - began:.1f} s", flush=True)
    if options.restoring_alone:
        note(results, "restoring_alone", restoring_alone(drawn, config, options.prompt), options.out)
        return 0
    report, filling, back = moving(drawn, config, options.batch, options.prompt, options.most_steps)
    note(results, "moving", report, options.out)
    model = drawn.patched(RuntimeConfig(budget_bytes=budget + resident[WIDTHS[-1]], **thresholds))
    note(results, "still", still(model, filling, options.prompt, options.stretch, options.every), options.out)
    note(results, "still_restoring", still(model, back, options.prompt, STRETCH_STEPS, 3), options.out)
    return 0 if report["filled"] else 1


if __name__ == "__main__":
    sys.exit(main())
