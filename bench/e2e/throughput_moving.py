"""Captured steps while pages leave and come back, beside the same steps held still."""

from __future__ import annotations

import json

import numpy as np

from bench.e2e.captured import CapturedDecoding
from pagedweight.patching_model import PagedModel

MOST_GROWING_STEPS, AWAY_STEPS, CYCLES = 64, 32, 3
NEIGHBOUR_TOKENS = 16  # a step: as sixteen more sequences would write
SHARE = 0.5  # at most, of what the weights can release
STILL_SAMPLES, STILL_STEPS, LOOK_STEPS = 3, 32, 16


class Neighbour:
    """Other sequences' KV cache in the same arena: grows for growing_steps, leaves, comes again.

    bits: widths seen on the way.
    """

    def __init__(self, runtime: PagedModel, growing_steps: int) -> None:
        self.bits: list[np.ndarray] = []
        self.growing_steps = growing_steps
        self._runtime = runtime
        self._cache = runtime.new_cache()
        self._at = 0

    def step(self) -> None:
        """What happens before a forward."""
        at, self._at = self._at % (self.growing_steps + AWAY_STEPS), self._at + 1
        if at % LOOK_STEPS == 0:
            self.bits.append(self._runtime.snapshot().bits)
        if at < self.growing_steps:
            tokens = NEIGHBOUR_TOKENS * (at + 1)
            self._runtime.boundary(self._cache.missing_frames(1, tokens), self._cache.frames_by_sequence(1))
            self._cache.reserve(1, tokens)
        else:
            if at == self.growing_steps:
                self._cache.release()
            self._runtime.boundary()

    def leave(self) -> None:
        self._cache.release()


def growing_steps(runtime: PagedModel) -> int:
    """So many that the neighbour takes no more than a share of what the weights can release."""
    now, sizes = runtime.snapshot(), runtime.store.host.sizes
    releasable = now.weight_bytes - int(sizes.resident_bytes()[:, 0].sum())
    block = runtime.kv.block_bytes * NEIGHBOUR_TOKENS // runtime.config.block_tokens
    return max(1, min(MOST_GROWING_STEPS, int(SHARE * releasable) // block))


def moving_row(decoding: CapturedDecoding) -> dict:
    """Tokens/s while moving and held still, and what has moved."""
    runtime, batch = decoding.model.pagedweight, decoding.batch
    neighbour, start = Neighbour(runtime, growing_steps(runtime)), runtime.snapshot()
    took = decoding.milliseconds(CYCLES * (neighbour.growing_steps + AWAY_STEPS), neighbour.step)
    neighbour.leave()
    end = runtime.snapshot()
    runtime.check()
    held = []
    for at in np.linspace(0, len(neighbour.bits) - 1, STILL_SAMPLES).astype(int):
        with runtime.held_at(neighbour.bits[at]):
            decoding.milliseconds(4)
            held.append(float(decoding.milliseconds(STILL_STEPS).mean()))
    row = {
        "batch": batch,
        "growing_steps": neighbour.growing_steps,
        "tokens_per_second": [1e3 * batch / took.mean(), 1e3 * batch / np.mean(held)],
        "slower_than_still": float(took.mean() / np.mean(held) - 1),
        "median_step_ms": [float(np.median(took)), float(np.median(held))],
        "longest_step_ms": float(took.max()),
        "bits": [float(min(seen.mean() for seen in neighbour.bits)), float(neighbour.bits[0].mean())],
        "released_bytes": end.moves.released_bytes - start.moves.released_bytes,
        "loaded_bytes": end.moves.loaded_bytes - start.moves.loaded_bytes,
        "stalled_ms": 1e3 * (end.moves.stalled_seconds - start.moves.stalled_seconds),
    }
    print(json.dumps(row), flush=True)
    return row
