"""What planning adds to a decode step: a step's own time beside its time with a boundary before it, 7,680 rows.

    python bench/runtime/bench_overhead.py [--steps 400] [--out bench/results/<gpu>-overhead.json]

The table is Gemma-4's (30 layers of 128 experts), its pages are small: planning depends on rows, not on bytes. On CUDA
a step is a graph of about --step-ms, then a wait for it, as sampling waits; or as many small launches from Python
("eager"), where a planner thread competes for the interpreter. Steps with and without a boundary alternate in groups,
so that a machine that slows down slows both; on a busy machine the CPU time of the calling thread is the figure.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pagedweight.layout import Layout, MoeLayer, RoutingStats
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.frames import Arena
from pagedweight.runtime.kv import ArenaGauge
from pagedweight.runtime.pages import HostPages, PageSizes
from pagedweight.runtime.planner import Plan
from pagedweight.runtime.transfer import ImmediateEngine

WIDTHS = (3, 4, 5, 6)
FRAME_BYTES = 512
BLOCK_FRAMES = 64
GROUP_STEPS = 40
SHAPE = (30, 128)
TINY_SHAPE = (2, 4)


def host_pages(layout: Layout, pinned: bool) -> HostPages:
    host = HostPages(PageSizes.of(layout, np.ones(layout.rows, dtype=np.int64), FRAME_BYTES), None if pinned else 0)
    page = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    tables = {bits: torch.zeros(64, 2**bits, dtype=torch.float16) for bits in WIDTHS}
    for row, (rows, _) in enumerate(layout.row_shapes()):
        for plane in range(WIDTHS[-1]):
            host.store(row, plane, page)
        for bits, table in tables.items():
            host.store_table(row, bits, table[:rows])
    return host


def runtime_of(shape: tuple[int, int], device: str, *, background: bool, spare_blocks: int) -> tuple[Runtime, Policy]:
    """Everything at the parent width, live statistics, residual heads; spare_blocks of KV are free."""
    layers, experts = shape
    layout = Layout(
        tuple(MoeLayer(at, experts, 64, 32) for at in range(layers)), WIDTHS, dict.fromkeys(WIDTHS, "lut16")
    )
    rng = np.random.default_rng(0)
    spread = np.exp(rng.normal(0, 1.5, (layout.rows, 1)) + rng.normal(0, 0.2, (layout.rows, len(WIDTHS))))
    count = len(WIDTHS)
    policy = Policy.from_sensitivity(layout, spread * 4.0 ** -np.array(WIDTHS), np.ones(layout.rows)).replaced(
        bucket_edges=[0.5, 0.9],
        multipliers=[0.8, 1.0, 1.6],
        floors=[[3, 3, 4], [3, 3, 3]],
        depth_caps=[[count] * 3],
        head_weights=rng.normal(0, 0.1, (2, count, count, 3)),
        head_confidence=rng.random((2, count, count)),
        alpha=0.5,
    )
    host = host_pages(layout, device == "cuda")
    frames = int(host.sizes.resident_bytes()[:, -1].sum()) // FRAME_BYTES + spare_blocks * BLOCK_FRAMES
    arena = Arena(frames * FRAME_BYTES, FRAME_BYTES, device)
    stats = RoutingStats.zeros(1, layers, experts, device)
    stats.mass.uniform_(0.1, 1.0)
    stats.counts.fill_(64)
    stats.features.uniform_(0.5, 2.0)
    engine = ImmediateEngine(arena)
    if device == "cuda":
        from pagedweight.runtime.transfer_cuda import CudaEngine

        engine = CudaEngine(arena)
    config = RuntimeConfig(background_rows=0 if background else 10**9)
    return Runtime(layout, host, arena, policy, config, engine, ArenaGauge(arena, BLOCK_FRAMES), stats), policy


def decode_step(device: str, step_ms: float, *, eager: bool) -> Callable[[], None]:
    """One step of about step_ms, waited for."""
    if device == "cpu":
        return lambda: time.sleep(step_ms / 1e3)
    x = torch.randn(1024, 1024, device=device)

    def launches(count: int) -> None:
        for _ in range(count):
            torch.mul(x, 1.0, out=x)

    def timed(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        launches(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / count * 1e3

    timed(200)
    count = max(1, int(step_ms / timed(2000)))
    if eager:
        return lambda: (launches(count), torch.cuda.synchronize())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches(count)
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    repeats = max(1, round(step_ms / ((time.perf_counter() - started) * 1e3)))
    return lambda: ([graph.replay() for _ in range(repeats)], torch.cuda.synchronize())


def group_ms(step: Callable[[], None], before: Callable[[], None] | None) -> float:
    """Mean milliseconds of a step over one group."""
    started = time.perf_counter()
    for _ in range(GROUP_STEPS):
        if before is not None:
            before()
        step()
    return (time.perf_counter() - started) / GROUP_STEPS * 1e3


def timed_planning(runtime: Runtime) -> list[float]:
    """Microseconds of every decision that boundaries take from now on: what of a boundary is not moving pages."""
    took, decide = [], runtime._planning.decide

    def timed(*arguments: object) -> Plan:
        started = time.perf_counter()
        plan = decide(*arguments)
        took.append((time.perf_counter() - started) * 1e6)
        return plan

    runtime._planning.decide = timed
    return took


def overhead(runtime: Runtime, step: Callable[[], None], groups: int, steps_per_block: int) -> dict[str, float]:
    """Steps with and without boundaries; steps_per_block: a KV block is taken every so many steps, 0 for never."""
    done, worked, at = [], [], 0
    planned = timed_planning(runtime)

    def before() -> None:
        nonlocal at
        at += 1
        started, cpu = time.perf_counter(), time.thread_time()
        if steps_per_block and at % steps_per_block == 0:
            runtime.boundary(pending_blocks=1)
            runtime.allocate_kv(BLOCK_FRAMES)
        else:
            runtime.boundary()
        done.append((time.perf_counter() - started) * 1e6)
        worked.append((time.thread_time() - cpu) * 1e6)

    group_ms(step, before)  # first calls, the thread's start
    for times in (done, worked, planned):
        times.clear()
    plain, with_boundary = [], []
    for _ in range(groups):
        plain.append(group_ms(step, None))
        with_boundary.append(group_ms(step, before))
    added = statistics.median(w - p for w, p in zip(with_boundary, plain, strict=True))
    return {
        "step_ms": statistics.median(plain),
        "added_us": 1e3 * added,
        "overhead": added / statistics.median(plain),
        "boundary_median_us": statistics.median(done),
        "boundary_mean_us": statistics.fmean(done),
        "boundary_longest_us": max(done),
        "boundary_cpu_mean_us": statistics.fmean(worked),
        "planning_median_us": statistics.median(planned),
        "planning_mean_us": statistics.fmean(planned),
        "planning_longest_us": max(planned),
        "planning_overhead": statistics.fmean(planned) / 1e3 / statistics.median(plain),
        "overhead_by_cpu": statistics.fmean(worked) / 1e3 / statistics.median(plain),
        "plans_ready": runtime._planning.queue.ready,
        "plans_made_late": runtime._planning.queue.made_late,
        "lowered_rows": runtime.snapshot().moves.lowered_rows,
    }


def bench_boundary_beside_a_planner_thread(benchmark) -> None:
    shape = TINY_SHAPE if benchmark.disabled else SHAPE
    runtime, _ = runtime_of(shape, "cuda" if torch.cuda.is_available() else "cpu", background=True, spare_blocks=20)
    benchmark(runtime.boundary)
    assert runtime.snapshot().moves.lowered_rows == 0
    runtime.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    found = {"device": name, "rows": 2 * SHAPE[0] * SHAPE[1], "python": sys.version.split()[0], "cases": []}
    found |= {"torch": torch.__version__, "command": f"python {shlex.join(sys.argv)}"}
    groups = max(3, arguments.steps // GROUP_STEPS)
    eager_too = ((False, True), (True, True)) if device == "cuda" else ((False, True),)
    for eager, background in (*eager_too, (False, False)):
        step = decode_step(device, arguments.step_ms, eager=eager)
        # Near the threshold statistics and queue are refreshed most often; far from it hardly ever.
        for situation, spare, steps_per_block in (("near", 24, 0), ("far", 4000, 0), ("pressure", 12, 4)):
            runtime, _ = runtime_of(SHAPE, device, background=background, spare_blocks=spare)
            figures = overhead(runtime, step, groups, steps_per_block)
            runtime.close()
            case = {"step": "eager" if eager else "graph", "situation": situation, "background": background}
            found["cases"].append({**case, **figures})
            print(json.dumps(found["cases"][-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
