"""Times the decode path on one GPU: microseconds per MoE layer, checked against fp64 first.

    python bench/kernels/bench_decode.py [--suite chosen] [--shapes qwen] [--out results.json]

Suites are named in bench/tune.py; `peers` needs vLLM.

Every figure is the median of CUDA-graph replays; a graph holds many calls whose experts differ, so that successive
calls read weights that are not in L2. All that the op launches is inside.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.runtime.jit import MockTensor

from bench.kernels.decode_layers import Gate, GpuLayer, dense_output, routing
from pagedweight.kernels.decode.config import DecodeConfig, ProductConfig
from pagedweight.kernels.decode.launches import Launch, decode_launches

READ_BYTES_PER_US = 4.25e6  # one launch that reads 170 MB, launch included
FORMATS = {
    "lut16": ("lut16",) * 7,
    "fast": ("lut8",) * 3 + ("affine",) * 4,
    "cubic": ("lut16",) * 3 + ("cubic",) * 4,
    "cubic from 3": ("lut16",) + ("cubic",) * 6,
    "affine": ("affine",) * 7,
}
LABELS = {
    "2": (2,),
    "3": (3,),
    "4": (4,),
    "5": (5,),
    "6": (6,),
    "7": (7,),
    "8": (8,),
    "mixed": (3, 4, 6),
    "345": (3, 4, 5),
    "2 to 6": (2, 3, 4, 5, 6),
    "all": (2, 3, 4, 5, 6, 7, 8),
}


class Case(NamedTuple):
    shape: str
    tokens: int
    label: str
    codebooks: str
    configs: list[DecodeConfig]
    frames: str = "framed"
    dtype: torch.dtype = torch.bfloat16
    met: int | None = None  # distinct experts of a call; None leaves it to chance
    gate: Gate = Gate()
    kernel: str | None = None  # label of the widths that the kernels serve, where they are more than the layer's


def kernel_widths(case: Case) -> tuple[int, ...]:
    return LABELS[case.kernel or case.label]


def launches_of(layer, batch, case, config):
    widths = kernel_widths(case)
    call = layer.call(batch, widths, codebooks_of(case.codebooks, widths), case.gate)
    return decode_launches(call, config, use_ptx=True)


def codebooks_of(name: str, widths: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(FORMATS[name][bits - 2] for bits in widths)


def planes_of(case: Case) -> int:
    return max(6, kernel_widths(case)[-1])


def case_launches(case: Case, config: DecodeConfig) -> list[Launch]:
    """A case's launches over tensors without memory."""
    layer = GpuLayer.meta(case.shape, case.frames, planes_of(case), case.gate.gated)
    return launches_of(layer, routing(layer, case.tokens, 0, case.dtype), case, config)[1]


def compile_jobs(jobs: list[tuple[Case, DecodeConfig, int]]) -> list[str]:
    """Compile in this process, all at once in many; returns what failed."""
    failures = []
    for case, config, index in jobs:
        launch = case_launches(case, config)[index]
        arguments = {k: MockTensor(v.dtype) if isinstance(v, torch.Tensor) else v for k, v in launch.arguments.items()}
        try:
            launch.kernel.warmup(grid=(1,), **arguments)
        except (triton.CompilationError, triton.runtime.errors.OutOfResources, RuntimeError) as error:
            failures.append(f"{case[:4]} {config}: {str(error)[-300:]}")
    return failures


def compile_all(cases: list[Case], workers: int) -> None:
    start = time.time()
    jobs = {}
    for case in cases:
        for config in case.configs:
            for index, launch in enumerate(case_launches(case, config)):
                made_for = {k: v.dtype if isinstance(v, torch.Tensor) else v for k, v in launch.arguments.items()}
                made_for.pop("tokens", None)
                jobs.setdefault(f"{launch.kernel.__name__} {made_for}", (case, config, index))
    jobs = list(jobs.values())
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failures = [f for part in pool.map(compile_jobs, [jobs[i::workers] for i in range(workers)]) for f in part]
    print(f"compiled {len(jobs)} kernels in {time.time() - start:.0f} s, {len(failures)} failed", flush=True)
    for failure in failures[:8]:
        print("  ", failure)


def graph_time(run, calls: int, replays: int = 15) -> float:
    """Median microseconds of one of the `calls` calls that `run()` makes, replayed as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in events)
    return times[len(times) // 2] * 1000 / calls


def run_peers(shape: str, counts: tuple[int, ...], records: list[dict]) -> None:
    """vLLM's kernels on the routings of our own rows."""
    from bench.kernels.peers import PEERS, answer

    meta = GpuLayer.meta(shape)
    meta.device = "cuda"
    for name, make in PEERS.items():
        layers = [make(shape, seed) for seed in range(2)]
        for tokens in counts:
            met = 5 if (shape, tokens) == ("mixtral", 4) else None
            count = call_count(tokens)
            routed = [routing(meta, tokens, i, torch.bfloat16, met) for i in range(count)]
            calls = [(layers[i % 2], x, ids.int(), weights) for i, (x, ids, weights, _slots) in enumerate(routed)]
            peer, *arguments = calls[0]
            checked = checked_tokens(tokens)
            wanted = answer(peer, *(tensor[checked] for tensor in arguments))
            error = float((peer.run(*arguments)[checked].double() - wanted).norm() / wanted.norm())
            us = graph_time(lambda calls=calls: [peer.run(*call) for peer, *call in calls], count)
            record = {"shape": shape, "tokens": tokens, "peer": name, "us": us, "error": error}
            records.append(record | {"experts_met": sum(len(call[2].unique()) for call in calls) / count})
            print(f"{shape:8s} M={tokens:<3d} {name:16s} {us:7.1f} us  err {error:.1e}  met {met}", flush=True)
        del layers, calls
        torch.cuda.empty_cache()


def call_count(tokens: int) -> int:
    return {1: 30, 4: 12}.get(tokens, 6)


def checked_tokens(tokens: int) -> list[int]:
    """Those whose answers are compared with fp64: all of a small batch, the first and last of a large one."""
    return list(range(tokens)) if tokens <= 4 else [0, 1, tokens - 2, tokens - 1]


def run_case(case: Case, layers: list[GpuLayer], records: list[dict], timed: bool, alone: bool) -> None:
    widths = LABELS[case.label]
    codebooks = codebooks_of(case.codebooks, widths)
    for number, layer in enumerate(layers):
        layer.commit(widths, codebooks, number)
    count = call_count(case.tokens)
    chosen = [layers[i % len(layers)] for i in range(count)]
    calls = [(layer, routing(layer, case.tokens, i, case.dtype, case.met)) for i, layer in enumerate(chosen)]
    checked = checked_tokens(case.tokens)
    wanted = dense_output(calls[0][0], *(tensor[checked] for tensor in calls[0][1][:3]), case.gate)
    floor = sum(layer.bytes_read(call[1]) for layer, call in calls) / count / READ_BYTES_PER_US
    best = None
    for config in case.configs:
        record = {
            "shape": case.shape,
            "tokens": case.tokens,
            "bits": case.label,
            "kernel": case.kernel,
            "codebooks": case.codebooks,
            "dtype": str(case.dtype).removeprefix("torch."),
            "frames": case.frames,
            "gate": case.gate._asdict(),
            "experts_met": sum(len(call[1].unique()) for _, call in calls) / count,
            "config": describe(config),
            "floor_us": floor,
        }
        try:
            out, launches = launches_of(*calls[0], case, config)
            out.fill_(float("nan"))
            for launch in launches:
                launch.run()
            record["error"] = float((out[checked].double() - wanted).norm() / wanted.norm())
            first = out.clone()
            for launch in launches:
                launch.run()
            if not torch.equal(first, out):
                record["error"] = float("nan")  # equal inputs must give equal bits
            prepared = [launches_of(*call, case, config)[1] for call in calls] if timed else []
            run = [launch for part in prepared for launch in part]
            record["us"] = timed and graph_time(lambda run=run: [launch.run() for launch in run], count)
        except (ValueError, triton.runtime.errors.OutOfResources) as error:
            record["failed"] = repr(error)[:300]  # a setting that cannot run is a result
        records.append(record)
        if record.get("error", 1) < 1e-2 and (best is None or record["us"] < best["us"]):
            best, best_prepared = record, prepared
        elif not record.get("error", 1) < 1e-2:
            print("  BAD", record, flush=True)
    if best is not None and timed and alone:
        # The last launch alone would wait for arrivals of its own: it is the difference.
        best["us_alone"] = [
            graph_time(lambda i=i: [part[i].run() for part in best_prepared], count)
            for i in range(len(best_prepared[0]) - 1)
        ]
    if best is not None and timed:
        parts = " ".join(f"{us:.1f}" for us in best.get("us_alone", []))
        print(
            f"{case.shape:8s} M={case.tokens:<3d} {case.label:5s} {case.codebooks:6s} {case.frames} "
            f"floor {floor:6.1f}  {best['us']:7.1f} us "
            f"({100 * floor / best['us']:2.0f} %) [{parts}] err {best['error']:.1e}  {best['config']}"
            f"{'' if case.gate == Gate() else '  ' + ' '.join(map(str, case.gate))}",
            flush=True,
        )


def describe(config: DecodeConfig) -> str:
    def one(p: ProductConfig) -> str:
        return f"r{p.rows}c{p.chunks}k{p.splits}w{p.warps}s{p.stages}" + (f"m{p.registers}" if p.registers else "")

    marks = {"int8": config.int8, "prepared": config.prepared, "pdl": config.early_launch, "sum": config.separate_sum}
    marks |= {"early": config.early_routing, "spread": config.spread}
    flags = "".join(f" {name}" for name, on in marks.items() if on)
    return f"t{config.tokens} {one(config.gate_up)} / {one(config.down)}{flags}"


def main(cases: list[Case], out: Path, peers: dict[str, tuple[int, ...]], timed: bool, workers: int) -> None:
    """peers: batch sizes of vLLM's rows by shape; none: vLLM is not needed. workers: processes that compile first."""
    start = time.time()
    if workers:
        compile_all(cases, workers)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    facts["command"] = "python " + " ".join(sys.argv)
    records: list[dict] = []

    def keep() -> None:
        out.write_text(json.dumps(facts | {"rows": records}, indent=1))

    groups = {}
    for case in cases:
        groups.setdefault((case.shape, case.frames, planes_of(case), case.gate.gated), []).append(case)
    for (shape, frames, planes, gated), group in groups.items():
        layers = [GpuLayer.random(shape, seed, frames=frames, planes=planes, gated=gated) for seed in range(2)]
        for case in group:
            run_case(case, layers, records, timed, alone=not peers)
            keep()
        del layers
        torch.cuda.empty_cache()
        if shape in peers:
            run_peers(shape, peers[shape], records)
            keep()
        print(f"t {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", default="chosen")
    parser.add_argument("--shapes", nargs="+", help="of the suites' shapes, these alone, in this order")
    parser.add_argument("--tokens", nargs="+", type=int, help="of the suites' batch sizes, these alone")
    parser.add_argument("--bits", nargs="+", help="of the suites' widths, these alone")
    parser.add_argument("--out", type=Path, default=Path("bench_decode.json"))
    parser.add_argument("--untimed", action="store_true", help="answers only")
    parser.add_argument(
        "--workers",
        type=int,
        default=min(14, os.cpu_count()),
        help="processes that compile first; 0: none",
    )
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache for the suites")
    arguments = parser.parse_args()
    from bench.tune import suite

    cases = [case for name in arguments.suite.split(",") for case in suite(name)]
    if arguments.shapes is not None:
        cases = [case for shape in arguments.shapes for case in cases if case.shape == shape]
    if arguments.tokens is not None:
        cases = [case for case in cases if case.tokens in arguments.tokens]
    if arguments.bits is not None:
        cases = [case for case in cases if case.label in arguments.bits]
    if arguments.compile_only:
        compile_all(cases, arguments.workers)
    else:
        batches: dict[str, tuple[int, ...]] = {}
        if "peers" in arguments.suite.split(","):
            for case in cases:
                batches[case.shape] = tuple(sorted({*batches.get(case.shape, ()), case.tokens}))
        main(cases, arguments.out, batches, not arguments.untimed, arguments.workers)
