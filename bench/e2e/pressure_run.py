"""Runs of bench/e2e/gpu_pressure.py: a batch that decodes under a boundary that is timed, and what its steps say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.e2e.decoding import Decoding
from pagedweight.runtime.controller_report import RuntimeSnapshot

STRETCH_STEPS = 16
SETTLING_STEPS = 3  # of a stretch: the first forwards after a wait start on an idle device
RESTORE_BATCH, RESTORE_STEPS = 4, 192
IDLE_BOUNDARIES = 2000  # at most, after that, without forwards
WORKSPACE_BYTES = 16 * 2**30


class Run(NamedTuple):
    """One run of the moving part. milliseconds, boundary_ms: (steps,), the second on the host. bits: (steps, R)."""

    batch: int
    milliseconds: np.ndarray
    boundary_ms: np.ndarray
    bits: np.ndarray


class TimedBoundary:
    """Stands before a model's boundary and keeps what each took on the host, in milliseconds."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.milliseconds: list[float] = []
        self._call = model.pagedweight.boundary
        model.pagedweight.boundary = self

    def __call__(self, *args: object, **kwargs: object) -> None:
        began = time.perf_counter()
        self._call(*args, **kwargs)
        self.milliseconds.append(1e3 * (time.perf_counter() - began))

    def take_off(self, model: PreTrainedModel) -> None:
        del model.pagedweight.boundary


def serve_until(
    model: PreTrainedModel, timed: TimedBoundary, prompt_tokens: int, bits: float
) -> tuple[Decoding, Run, RuntimeSnapshot]:
    """A small batch decodes while pages come back, for RESTORE_STEPS at most; the runtime before it ends."""
    restoring = Decoding(model, RESTORE_BATCH, prompt_tokens)
    timed.milliseconds.clear()
    restoring.run(STRETCH_STEPS)
    while len(restoring.seen) < RESTORE_STEPS and model.pagedweight.snapshot().mean_bits < bits:
        restoring.run(STRETCH_STEPS)
    back, rested = run_of(restoring, timed), model.pagedweight.snapshot()
    restoring.cache.release()
    return restoring, back, rested


def come_back(model: PreTrainedModel, bits: float) -> tuple[int, float]:
    """Boundaries, as between two requests, until so many bits are held; how many, and the seconds that they took."""
    runtime, began = model.pagedweight, time.perf_counter()
    for done in range(IDLE_BOUNDARIES):
        if runtime.snapshot().mean_bits >= bits:
            return done, time.perf_counter() - began
        runtime.boundary()
        time.sleep(1e-3)
    return IDLE_BOUNDARIES, time.perf_counter() - began


def run_of(decoding: Decoding, timed: TimedBoundary) -> Run:
    took = decoding.milliseconds()
    # The forward that found no room had a boundary too.
    boundaries = np.array(timed.milliseconds[: len(took)])
    return Run(decoding.batch, took, boundaries, np.stack([seen.bits for seen in decoding.seen]))


def spread(values: Sequence[int]) -> int:
    return int(np.ptp(values or [0]))


def warm_up(model: PreTrainedModel, batch: int, prompt_tokens: int) -> None:
    """Compile what both batch sizes need, then wait until every width is back at its start."""
    began = time.perf_counter()
    for size in (batch, RESTORE_BATCH):
        decoding = Decoding(model, size, prompt_tokens)
        decoding.run(2 * SETTLING_STEPS)
        decoding.cache.release()
    print(f"warm after {time.perf_counter() - began:.1f} s", flush=True)
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


def over_time(decoding: Decoding, run: Run) -> list[dict]:
    """One row for each stretch: tokens/s, mean bits and bytes."""
    rows = []
    for first in range(0, len(run.milliseconds), STRETCH_STEPS):
        stretch = slice(first, first + STRETCH_STEPS)
        seen, part = decoding.seen[first], run.milliseconds[stretch]
        rows.append(
            {
                "step": first,
                "tokens_per_second": float(1e3 * run.batch * len(part) / part.sum()),
                "longest_ms": float(part.max()),
                "boundary_ms": float(run.boundary_ms[stretch].sum()),
                "bits": seen.mean_bits,
                "kv_mib": seen.kv_bytes >> 20,
                "weight_mib": seen.weight_bytes >> 20,
                "free_mib": seen.bytes_by_owner["free"] >> 20,
            }
        )
    return rows
