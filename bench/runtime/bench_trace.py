"""Replays a KV trace through the whole runtime on the CPU: growth, shrinking, bursts of short prompts, an end.

    python bench/runtime/bench_trace.py [--out bench/results/planner-trace.json]

Qwen1.5-MoE's 2,880 linear-blocks over small pages, KV blocks in the same arena. Reported for the default thresholds,
for thresholds without a gap or dwell time, and with a forecast: bytes moved, how often a row turned round, boundaries
whose forward needed more blocks than were free, so that weights had to go at once, and what a boundary took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.frames import Arena
from pagedweight.runtime.kv import ArenaGauge
from pagedweight.runtime.pages import HostPages, PageSizes
from pagedweight.runtime.transfer import ImmediateEngine

WIDTHS = (2, 3, 4, 5, 6)
FRAME_BYTES = 256
BLOCK_FRAMES = 48
BLOCK_TOKENS = 16
QWEN = (24, 60)
TINY = (2, 6)
QUIET_STEPS = 400
CONFIGS = {
    "default": RuntimeConfig(),
    "no gap, no dwell": RuntimeConfig(offload_free_blocks=8, reload_free_blocks=9, min_dwell_steps=0),
    "forecast": RuntimeConfig(forecast_tokens=64),
    "in the background": RuntimeConfig(background_rows=0),
}


class Request(NamedTuple):
    """Arrives at a step with a prompt, writes a token at each step after, and ends; tokens."""

    arrives: int
    prompt: int
    answer: int

    def tokens(self, step: int) -> int:
        age = step - self.arrives
        return self.prompt + age if 0 <= age < self.answer else 0


def requests(blocks: int, steps: int) -> list[Request]:
    """Long requests that fill about `blocks` blocks by a third of the trace, then bursts of short prompts."""
    rng = np.random.default_rng(0)
    long = [Request(int(at), 32, steps // 2 - int(at)) for at in np.linspace(0, steps // 6, 6)]
    grown = sum(request.tokens(steps // 3) for request in long)
    scale = max(1.0, blocks * BLOCK_TOKENS / grown)
    long = [request._replace(prompt=int(scale * request.tokens(steps // 3) * 0.5)) for request in long]
    short = [
        Request(int(at + rng.integers(0, 4)), int(rng.integers(8, 48)), int(rng.integers(4, 24)))
        for at in range(steps // 4, 3 * steps // 4, 25)
        for _ in range(8)
    ]
    return long + short


def runtime_of(shape: tuple[int, int], config: RuntimeConfig) -> Runtime:
    """All at the parent width with three reload thresholds of KV blocks beside it."""
    layers, experts = shape
    moe = tuple(MoeLayer(at, experts, 64, 32) for at in range(layers))
    layout = Layout(moe, WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
    rng = np.random.default_rng(0)
    spread = np.exp(rng.normal(0, 1.5, (layout.rows, 1)) + rng.normal(0, 0.2, (layout.rows, len(WIDTHS))))
    policy = Policy.from_sensitivity(layout, spread * 4.0 ** -np.array(WIDTHS), np.ones(layout.rows))
    plane_frames = np.array([-(-n * k // 8 // FRAME_BYTES) for n, k in layout.row_shapes()])
    host = HostPages(PageSizes.of(layout, plane_frames, FRAME_BYTES))
    for row, (n, _) in enumerate(layout.row_shapes()):
        for plane in range(WIDTHS[-1]):
            host.store(row, plane, torch.zeros(int(plane_frames[row]) * FRAME_BYTES, dtype=torch.uint8))
        for bits in WIDTHS:
            host.store_table(row, bits, torch.zeros(n, 2**bits, dtype=torch.float16))
    frames = int(host.sizes.resident_bytes()[:, -1].sum()) // FRAME_BYTES + 48 * BLOCK_FRAMES
    arena = Arena(frames * FRAME_BYTES, FRAME_BYTES)
    gauge = ArenaGauge(arena, BLOCK_FRAMES)
    return Runtime(layout, host, arena, policy, config, ImmediateEngine(arena), gauge)


def replayed(shape: tuple[int, int], config: RuntimeConfig, steps: int) -> dict[str, object]:
    """The trace from start to end, then 100 quiet boundaries."""
    runtime = runtime_of(shape, config)
    placed = runtime.snapshot().moves.loaded_bytes
    sizes = runtime.snapshot().bytes_by_width[WIDTHS[-1]]
    room = (sizes - int(runtime._table.snapshot().bytes[:, 0].sum())) // (BLOCK_FRAMES * FRAME_BYTES)
    trace = requests(int(0.6 * room), steps)
    held: dict[int, np.ndarray] = {}
    short, took, turns, last, bits = 0, [], [], np.zeros(runtime.layout.rows), [runtime.snapshot().bits]
    for step in range(steps + QUIET_STEPS):
        wanted = {at: -(-request.tokens(step) // BLOCK_TOKENS) for at, request in enumerate(trace)}
        for at in [at for at in held if not wanted[at]]:
            runtime.arena.free(held.pop(at))
        new = {at: n - len(held.get(at, ())) // BLOCK_FRAMES for at, n in wanted.items() if n}
        forecast = config.forecast_tokens * len(new) // BLOCK_TOKENS
        began = time.perf_counter()
        pending = sum(new.values())
        before_blocks = runtime.arena.free_frames // BLOCK_FRAMES
        runtime.boundary(pending_blocks=pending, forecast_blocks=forecast)
        took.append(time.perf_counter() - began)
        short += pending > before_blocks
        for at, count in new.items():
            if count > 0:
                held[at] = np.concatenate(
                    [held.get(at, np.empty(0, np.int64)), runtime.allocate_kv(count * BLOCK_FRAMES)]
                )
        bits.append(runtime.snapshot().bits)
        way = np.sign(bits[-1] - bits[-2])
        turns.append(int(((way * last) < 0).sum()))
        last = np.where(way != 0, way, last)
    runtime.check()
    moves = runtime.snapshot().moves
    changes = (np.diff(bits, axis=0) != 0).sum(0)
    runtime.close()
    return {
        "rows": runtime.layout.rows,
        "steps": steps,
        "lowered_rows": moves.lowered_rows,
        "released_bytes": moves.released_bytes,
        "loaded_bytes": moves.loaded_bytes - placed,
        "weight_bytes_at_parent": sizes,
        "least_mean_bits": float(np.mean(bits, axis=1).min()),
        "back_at_parent_width": bool((bits[-1] == WIDTHS[-1]).all()),
        "turns": int(np.sum(turns)),
        "most_changes_of_a_row": int(changes.max()),
        "boundaries_short_of_blocks": int(short),
        "boundary_median_us": 1e6 * statistics.median(took),
        "boundary_longest_ms": 1e3 * max(took),
    }


def bench_trace(benchmark) -> None:
    found = benchmark.pedantic(replayed, (TINY, CONFIGS["default"], 200), rounds=1)
    benchmark.extra_info.update(found)
    assert found["back_at_parent_width"]
    assert found["turns"] <= 3 * found["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, config in CONFIGS.items():
        found[name] = replayed(QWEN, config, arguments.steps)
        print(name, json.dumps(found[name]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
