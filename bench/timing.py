"""Time a call the same way everywhere: as replays of a CUDA graph with a cold L2, or plainly on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU we know


def median_ms(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median milliseconds of one call; on CUDA the launch overhead of Python is left out, and nothing stays in L2."""
    if device.type == "cuda":
        return _median_graph_ms(call, repeats)
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def capture(call: Callable[[], object], warmups: int = 2) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph; it has run `warmups` times before, so everything is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _median_graph_ms(call: Callable[[], object], repeats: int) -> float:
    graph = capture(call)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)
