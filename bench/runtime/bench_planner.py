"""Times one planner step at the sizes of real models, widths 3 to 6, routing and residuals live, on one core.

    python bench/runtime/bench_planner.py [--out X.json]  # figures, also the growth up to 100,000 rows
    python -m pytest bench/runtime/bench_planner.py       # the same sizes under pytest-benchmark

CPU time of the calling thread is printed beside wall time: on a busy machine the first is the figure to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Plan, Queue, plan_raise, plan_step
from pagedweight.runtime.planner_scores import lowest_index, score_actions
from pagedweight.runtime.planner_stages import legal_steps
from pagedweight.runtime.table_view import TableSnapshot

WIDTHS = (3, 4, 5, 6)
FRAME_BYTES = 16384
THRESHOLD_BLOCKS = 8
MOST_MS_AT_GEMMA = 5.0


class Case(NamedTuple):
    """A model's layers and shapes; blocks_short is what the KV cache lacks in the timed steps under pressure."""

    name: str
    layers: int
    experts: int
    hidden: int
    intermediate: int
    block_bytes: int
    blocks_short: int


CASES = (
    Case("Mixtral-8x7B", 32, 8, 4096, 14336, 2 << 20, 64),
    Case("Qwen1.5-MoE-A2.7B", 24, 60, 2048, 1408, 3 << 20, 64),
    Case("Gemma-4-26B-A4B", 30, 128, 2816, 704, 320 << 10, 64),
)
LARGE = Case("100,000 rows", 100, 500, 2816, 704, 320 << 10, 64)
TINY = Case("tiny", 2, 4, 64, 32, 4096, 1)


class Step(NamedTuple):
    table: TableSnapshot
    observation: Observation
    policy: Policy


def step_of(case: Case, stages: int = 1) -> Step:
    """A page table at the parent width, a policy with three buckets and residual heads, and live signals."""
    rng = np.random.default_rng(0)
    layer = [MoeLayer(at, case.experts, case.hidden, case.intermediate) for at in range(case.layers)]
    layout = Layout(tuple(layer), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
    rows, count = layout.rows, len(WIDTHS)
    spread = np.exp(rng.normal(0, 1.5, (rows, 1)) + rng.normal(0, 0.2, (rows, count)))
    policy = Policy.from_sensitivity(
        layout, spread * 4.0 ** -np.array(WIDTHS), np.repeat(rng.gamma(0.5, 1, rows // 2), 2)
    )
    policy = policy.replaced(
        bucket_edges=[0.5, 0.9],
        multipliers=[0.8, 1.0, 1.6],
        floors=[[3, 3, 4], [3, 3, 3]][-stages:],
        depth_caps=[[count] * 3],
        head_weights=rng.normal(0, 0.1, (2, count, count, 3)),
        head_confidence=rng.random((2, count, count)),
        alpha=0.5,
    )
    identity = np.array([(b.layer, b.expert, int(b.projection)) for b in layout.blocks()])
    parent, still = np.full(rows, WIDTHS[-1]), np.zeros(rows, dtype=np.int64)
    table = TableSnapshot(WIDTHS, parent, parent, held_bytes(layout), still > 0, still, *identity.T)
    observation = Observation(
        KVState(THRESHOLD_BLOCKS + 1, case.block_bytes),
        THRESHOLD_BLOCKS,
        mass=rng.dirichlet(np.full(case.experts, 0.3), case.layers),
        routed=np.full(case.layers, 4096.0),
        features=rng.normal(3, 1, (rows, 3)),
        confidence=rng.random(rows),
    )
    return Step(table, observation, policy)


def held_bytes(layout: Layout) -> np.ndarray:
    """(R, W) M_i^b in whole frames: planes, the width's table, and the floor table."""
    shapes = np.array(layout.row_shapes())
    rows, columns = shapes[:, 0], shapes[:, 1]

    def frames(size: np.ndarray) -> np.ndarray:
        return -(-size // FRAME_BYTES) * FRAME_BYTES

    plane, tables = frames(rows * columns // 8), {b: frames(rows * 2 * 2**b) for b in WIDTHS}
    return np.stack([b * plane + tables[b] + tables[WIDTHS[0]] * (b > WIDTHS[0]) for b in WIDTHS], axis=1)


def pressed(case: Case, step: Step) -> Observation:
    return step.observation._replace(kv=KVState(THRESHOLD_BLOCKS + 1 - case.blocks_short, case.block_bytes))


def check(case: Case, step: Step, plan: Plan) -> float:
    """Fails on a wrong plan; returns its damage relative to a bound that no plan beats, the fractional optimum."""
    target = case.blocks_short * case.block_bytes
    assert plan.released_bytes >= target
    assert plan.shortfall_bytes == 0
    scores = score_actions(step.table, step.observation, step.policy)
    steps = legal_steps(scores, lowest_index(scores, step.table, step.observation, step.policy, -1, -1))
    count = steps.meeting(target)
    (released, damage), (_, beyond) = steps.totals(count - 1), steps.totals(count)
    step_bytes = steps.totals(count)[0] - released
    return plan.damage / (damage + (beyond - damage) * (target - released) / step_bytes)


@pytest.mark.parametrize("case", [TINY, *CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("pressure", [False, True], ids=["calm", "pressed"])
def bench_plan_step(benchmark, case: Case, pressure: bool) -> None:
    step = step_of(case)
    seen = pressed(case, step) if pressure else step.observation
    _, plan = benchmark(plan_step, step.table, seen, step.policy, Queue())
    benchmark.extra_info["rows"] = step.policy.rows
    if pressure:
        benchmark.extra_info["damage against the fractional optimum"] = check(case, step, plan)
    else:
        assert plan == Plan()


def bench_plan_raise(benchmark) -> None:
    case = TINY if benchmark.disabled else CASES[-1]
    step = step_of(case)
    lowered = step.table._replace(committed=np.full(step.policy.rows, WIDTHS[0]))
    plan = benchmark(plan_raise, lowered, step.observation, step.policy, 64 * case.block_bytes)
    assert plan.transitions
    assert -plan.released_bytes <= 64 * case.block_bytes


def timed_ms(call, repeats: int) -> tuple[float, float]:
    """Median (CPU, wall) milliseconds of a call."""
    call()
    taken = []
    for _ in range(repeats):
        cpu, wall = time.thread_time(), time.perf_counter()
        call()
        taken.append((time.thread_time() - cpu, time.perf_counter() - wall))
    return tuple(1e3 * statistics.median(column) for column in zip(*taken, strict=True))


def report(case: Case, stages: int, repeats: int) -> dict[str, object]:
    """Prints one line; the medians of a step without pressure and of one under it, in CPU and wall milliseconds."""
    step = step_of(case, stages)
    calm = timed_ms(lambda: plan_step(step.table, step.observation, step.policy, Queue()), repeats)
    seen = pressed(case, step)
    tight = timed_ms(lambda: plan_step(step.table, seen, step.policy, Queue()), repeats)
    ratio = check(case, step, plan_step(step.table, seen, step.policy, Queue())[1]) if stages == 1 else math.nan
    print(
        f"{case.name:>18} {step.policy.rows:>7} rows {stages} stages: calm {calm[0]:6.2f} ms CPU {calm[1]:6.2f} wall, "
        f"pressed {tight[0]:6.2f} CPU {tight[1]:6.2f} wall, damage / fractional optimum {ratio:.6f}",
        flush=True,
    )
    names = ("calm_cpu_ms", "calm_wall_ms", "pressed_cpu_ms", "pressed_wall_ms")
    figures = {name: round(value, 3) for name, value in zip(names, (*calm, *tight), strict=True)}
    return {"layout": case.name, "rows": step.policy.rows, "stages": stages, **figures}


def settle_allocator() -> None:
    """Make the C allocator keep freed memory, as it does in any process that has loaded a model's weights.

    Otherwise glibc gives temporaries of a few hundred kB back to the system at each step, and page faults are timed.
    """
    np.ones(30 << 20, dtype=np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settle_allocator()
    before = os.getloadavg()[0]
    rows = 2 * CASES[-1].layers * CASES[-1].experts
    allowed, found = 1e5 * math.log(1e5) / (rows * math.log(rows)), []
    for stages in (1, 2):
        found += [report(case, stages, 101) for case in CASES]
        found.append(report(LARGE, stages, 15))
        for what in ("calm", "pressed"):
            small, big = (row[f"{what}_cpu_ms"] for row in found[-2:])
            print(
                f"{what}, {stages} stages: {small:.2f} ms at {rows:,} rows, "
                f"{'within' if small <= MOST_MS_AT_GEMMA else 'ABOVE'} {MOST_MS_AT_GEMMA} ms; 100,000 rows take "
                f"{big / small:.1f} times as long, {'within' if big / small <= allowed else 'ABOVE'} the "
                f"{allowed:.1f} times of n log n"
            )
    load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(load)
    if arguments.out:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {load}; one thread"
        record = {"machine": machine, "command": f"python {shlex.join(sys.argv)}", "python": platform.python_version()}
        arguments.out.write_text(json.dumps(record | {"numpy": np.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
