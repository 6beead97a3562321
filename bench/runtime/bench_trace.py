"""Replays KV traces through the whole runtime on the CPU: growth, shrinking, bursts of short prompts, an end.

    python bench/runtime/bench_trace.py [--out bench/results/planner-trace.json]

Qwen1.5-MoE's 2,880 linear-blocks over small pages, KV blocks in the same arena; for the default thresholds, for
thresholds without a gap or dwell time, with a forecast, and for bursts every 10, 25 and 50 steps alone.

Oscillation is a row that is raised and lowered again: rows_by_turns counts rows by how often they changed direction (1
is down and up again, once), raised_in_vain those moves that fell again within 64 boundaries. The first burst cannot be
told from the last one, so what it took may come back and fall once more; after that nothing may. A stall is a failed
allocation, of which the trace would die, or a boundary beyond 10 ms that is not accounted for by the rows it moves.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
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
BURST_BLOCKS = 60
FORWARD_SECONDS = 0.002  # between boundaries, in which a planner's thread may work
QUIET_STEPS = 800
SOON_STEPS = 64
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


def regular_bursts(period: int) -> Callable[[int, int], list[Request]]:
    """One long request of some 60 blocks less than there is room for, and a burst of as many every `period` steps,
    which lasts half of them, for two thirds of the trace."""

    def trace(blocks: int, steps: int) -> list[Request]:
        long = Request(0, (blocks - BURST_BLOCKS) * BLOCK_TOKENS, steps)
        size = BURST_BLOCKS * BLOCK_TOKENS // 8
        times = range(50, 2 * steps // 3, period)
        return [long] + [Request(at, size - period, period // 2) for at in times for _ in range(8)]

    return trace


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


def replayed(
    shape: tuple[int, int], config: RuntimeConfig, steps: int, trace_of: Callable[[int, int], list[Request]] = requests
) -> dict[str, object]:
    """A trace from start to end, then quiet boundaries."""
    runtime = runtime_of(shape, config)
    placed = runtime.snapshot().moves.loaded_bytes
    sizes = runtime.snapshot().bytes_by_width[WIDTHS[-1]]
    room = (sizes - int(runtime._table.snapshot().bytes[:, 0].sum())) // (BLOCK_FRAMES * FRAME_BYTES)
    trace = trace_of(int(0.6 * room), steps)
    held: dict[int, np.ndarray] = {}
    short, took, bits = 0, [], [runtime.snapshot().bits]
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
        time.sleep(FORWARD_SECONDS)
    runtime.check()
    moves = runtime.snapshot().moves
    runtime.close()
    moved = np.diff(bits, axis=0)
    turns = [turned(row) for row in moved.T]
    longest = int(np.argmax(took))
    return {
        "rows": runtime.layout.rows,
        "steps": steps,
        "lowered_rows": moves.lowered_rows,
        "released_bytes": moves.released_bytes,
        "loaded_bytes": moves.loaded_bytes - placed,
        "weight_bytes_at_parent": sizes,
        "least_mean_bits": float(np.mean(bits, axis=1).min()),
        "back_at_parent_width": bool((bits[-1] == WIDTHS[-1]).all()),
        "rows_by_turns": np.bincount([len(of_row) for of_row in turns]).tolist(),
        "raised_in_vain": sum(fell - rose <= SOON_STEPS for of_row in turns for rose, fell in falls_again(of_row)),
        "boundaries_short_of_blocks": int(short),
        "boundary_median_us": 1e6 * statistics.median(took),
        "boundary_longest_ms": 1e3 * took[longest],
        "rows_moved_by_the_longest": int(np.count_nonzero(moved[longest])),
    }


def turned(moves: np.ndarray) -> list[tuple[int, int, int]]:
    """(direction, step of the move before, step of this one) of every move (n,) of a row that reverses the last."""
    steps = np.flatnonzero(moves)
    ways = np.sign(moves[steps])
    return [(int(ways[i]), int(steps[i - 1]), int(steps[i])) for i in range(1, len(steps)) if ways[i] != ways[i - 1]]


def falls_again(turns: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Steps of the raise and of the lowering that undid it."""
    return [(before, at) for way, before, at in turns if way < 0]


def bench_trace(benchmark) -> None:
    found = benchmark.pedantic(replayed, (TINY, CONFIGS["default"], 200), rounds=1)
    benchmark.extra_info.update(found)
    assert found["back_at_parent_width"]
    assert len(found["rows_by_turns"]) <= 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {"command": f"python {shlex.join(sys.argv)}", "machine": f"{platform.machine()}, torch {torch.__version__}"}
    runs = {name: (config, requests) for name, config in CONFIGS.items()}
    runs |= {f"bursts every {period} steps": (CONFIGS["default"], regular_bursts(period)) for period in (10, 25, 50)}
    for name, (config, trace_of) in runs.items():
        found[name] = replayed(QWEN, config, arguments.steps, trace_of)
        print(name, json.dumps(found[name]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
