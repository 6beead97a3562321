"""Where the time of an engine's steps goes: the host's parts of a step, and the device's kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

KERNELS_NAMED = 12


def host_parts(llm: Any, batch: Callable[[], Any]) -> dict[str, float]:
    """Mean microseconds a step that a batch spends in each of the engine's calls.

    Calls nest: begin_step is within schedule, boundary within execute_model, all within step_fn.
    """
    engine = llm.llm_engine.engine_core.engine_core
    calls: list[tuple[Any, str]] = [
        (engine.scheduler, "schedule"),
        (engine.scheduler, "update_from_output"),
        (engine.model_executor, "execute_model"),
        (engine.model_executor, "sample_tokens"),
        (engine, "step_fn"),
    ]
    if hasattr(engine.scheduler, "weights"):
        calls += [(engine.scheduler.weights, "begin_step"), (engine.scheduler.weights, "end_step")]
        rank = engine.vllm_config.quant_config.rank
        calls += [(rank, "boundary"), (rank, "read_signals")] if rank else []  # else in a process of its own
    spent: dict[str, float] = defaultdict(float)
    steps = 0

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += name == "schedule"
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return run

    originals = [(owner, name, getattr(owner, name)) for owner, name in calls]
    for owner, name, call in originals:
        setattr(owner, name, timed(name, call))
    start = time.perf_counter()
    batch()
    spent["all"] = time.perf_counter() - start
    for owner, name, call in originals:
        setattr(owner, name, call)
    return {name: round(1e6 * seconds / steps, 1) for name, seconds in spent.items()}


def kernels(batch: Callable[[], Any], steps: int) -> dict[str, float]:
    """Microseconds of device time a step by kernel, the longest first, then of all others, and of all."""
    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        batch()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        times[event.key[:60]] += event.self_device_time_total / steps
    ordered = sorted(times.items(), key=lambda item: -item[1])
    found = {name: round(microseconds, 2) for name, microseconds in ordered[:KERNELS_NAMED]}
    others = sum(microseconds for _, microseconds in ordered[KERNELS_NAMED:])
    return {**found, "others": round(others, 2), "all": round(sum(times.values()), 2)}
