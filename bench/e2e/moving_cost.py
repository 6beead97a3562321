"""What moving costs a step: groups of steps in which pages move and groups in which none does, turn about.

    python -m bench.e2e.moving_cost --model qwen --layers 24 --out bench/results/h200-moving-cost.json

At a model's true shape with drawn weights (bench/e2e/drawn.py), from 6 bits to 3 while a KV cache takes the bytes, and
back. Neighbouring groups have the same widths but for what moves between them; a machine that slows down slows both.

captured: a batch decodes with its whole step in one CUDA graph, the host one step ahead, as an engine serves; the cache
of --batch other sequences grows beside it. eager: the batch itself grows, each forward launched from Python, so that
every microsecond of the host counts. Steps of a pause move nothing, so the next group moves for both: a run in which
every step moves its own share is slower by half of what moving groups are, and by all of it while pages come back.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from bench.e2e.captured import WHOLE_CACHE, CapturedDecoding, attend_to_whole_cache
from bench.e2e.decoding import Decoding
from bench.e2e.drawn import Drawn, draw
from bench.e2e.gpu_pressure import BUFFER_BYTES, WIDTHS, warm_up
from pagedweight import RuntimeConfig
from pagedweight.runtime.frames import OutOfFrames

GROUP_STEPS = 11  # at Qwen1.5-MoE's shape a frame holds 11 tokens: each group takes frames once
CONTEXT_TOKENS = 512
MOST_GROUPS = 120
MOST_RESTORING_GROUPS = 60
EAGER_GROUPS, EAGER_RESTORING_GROUPS = 26, 12


class Growing:
    """Other sequences' cache: --batch of them, a token each a step."""

    def __init__(self, model: PreTrainedModel, batch: int) -> None:
        self._runtime, self._batch, self._tokens = model.pagedweight, batch, 0
        self._cache = self._runtime.new_cache()
        self.grows = True

    def step(self) -> None:
        """What happens before a forward."""
        if not self.grows:
            self._runtime.boundary()
            return
        self._tokens += 1
        frames = self._cache.missing_frames(self._batch, self._tokens)
        self._runtime.boundary(frames, self._cache.frames_by_sequence(self._batch))
        self._cache.reserve(self._batch, self._tokens)

    def leave(self) -> None:
        self._cache.release()
        self.grows = False


class Alternating:
    """Groups of steps, every second one paused. took: (groups, steps) milliseconds. bits: (groups,) at their start."""

    def __init__(self, model: PreTrainedModel, run: Callable[[int], np.ndarray]) -> None:
        self._runtime = model.pagedweight._runtime
        self._snapshot = model.pagedweight.snapshot
        self._run = run
        self.took: list[np.ndarray] = []
        self.bits: list[float] = []

    def go(self, groups: int, until_bits: float) -> None:
        """Until so many groups have run, the widths are there, or the cache finds no more room."""
        for number in range(groups):
            bits = self._snapshot().mean_bits
            if abs(bits - until_bits) < 1e-6 and number:
                return
            if number % 2:
                self._runtime.pause()
            try:
                took = self._run(GROUP_STEPS)
            except OutOfFrames:
                return
            finally:
                if number % 2:
                    self._runtime.resume()
            if len(took) < GROUP_STEPS:
                return
            self.took.append(took)
            self.bits.append(bits)

    def report(self, share: float) -> dict:
        """share: what a run in which every step moves has of what moving groups cost."""
        pairs = len(self.took) // 2
        if not pairs:
            return {"pairs_of_groups": 0}
        took = np.stack(self.took[: 2 * pairs]).reshape(pairs, 2, GROUP_STEPS).sum(-1)
        added = share * (took[:, 0] / took[:, 1] - 1)
        # What a resampling of the pairs gives, nineteen times of twenty.
        drawn = np.random.default_rng(0).integers(0, pairs, (2000, pairs))
        means = share * (took[drawn, 0].sum(1) / took[drawn, 1].sum(1) - 1)
        return {
            "pairs_of_groups": pairs,
            "step_ms": (took.mean(0) / GROUP_STEPS).tolist(),
            "slowdown": float(share * (took[:, 0].sum() / took[:, 1].sum() - 1)),
            "slowdown_interval": np.quantile(means, (0.025, 0.975)).tolist(),
            "median_slowdown_of_pairs": float(np.median(added)),
            "longest_step_ms": [float(np.max(self.took[kind::2])) for kind in (0, 1)],
            "bits": [self.bits[0], self._snapshot().mean_bits],
        }


def captured(drawn: Drawn, config: RuntimeConfig, batch: int) -> dict:
    drawn.model.set_attn_implementation(WHOLE_CACHE)
    model = drawn.patched(config)
    decoding, growing = CapturedDecoding(model, batch, CONTEXT_TOKENS), Growing(model, batch)
    turns = Alternating(model, lambda steps: decoding.milliseconds(steps, growing.step))
    decoding.milliseconds(4 * GROUP_STEPS)
    turns.go(MOST_GROUPS, WIDTHS[0])
    lowering = turns.report(0.5)
    growing.leave()
    turns = Alternating(model, lambda steps: decoding.milliseconds(steps, growing.step))
    turns.go(MOST_RESTORING_GROUPS, WIDTHS[-1])
    return {"lowering": lowering, "raising": turns.report(1.0)}


def eager(drawn: Drawn, config: RuntimeConfig, batch: int) -> dict:
    drawn.model.set_attn_implementation("sdpa")
    model = drawn.patched(config)
    warm_up(model, batch, 32)

    def run(steps: int) -> np.ndarray:
        done = decoding.run(steps)
        return decoding.milliseconds()[-done:] if done else np.empty(0)

    decoding = Decoding(model, batch, 32)
    turns = Alternating(model, run)
    turns.go(EAGER_GROUPS, WIDTHS[0])
    lowering = turns.report(0.5)
    decoding.cache.release()
    decoding = Decoding(model, 4, 32)
    turns = Alternating(model, run)
    turns.go(EAGER_RESTORING_GROUPS, WIDTHS[-1])
    return {"lowering": lowering, "raising": turns.report(1.0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--spare-mib", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    attend_to_whole_cache()
    gc.disable()
    began = time.perf_counter()
    drawn = draw(options.model, options.layers, WIDTHS, options.device, BUFFER_BYTES if options.device == "cuda" else 0)
    budget = drawn.resident_bytes()[WIDTHS[-1]] + options.spare_mib * 2**20
    config = RuntimeConfig(
        budget_bytes=budget, offload_free_blocks=2 * options.batch, reload_free_blocks=3 * options.batch
    )
    results = {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": [torch.__version__, transformers.__version__],
        "command": " ".join(["python -m bench.e2e.moving_cost", *sys.argv[1:]]),
        "budget_bytes": budget,
    }
    for name, part in (("captured", captured), ("eager", eager)):
        results[name] = part(drawn, config, options.batch)
        print(f"{time.perf_counter() - began:.1f} s", json.dumps({name: results[name]}), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
