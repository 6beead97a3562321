"""Times batches above 64 tokens on one GPU, beside the grouped kernels and vLLM's bf16 experts; checked against fp64.

    python bench/kernels/bench_prefill.py [--suite chosen] [--peers] [--out results.json]

Every figure is the median of CUDA-graph replays over calls with different routings, all launches of the op inside.
`memory` is what a call holds beyond its inputs at its peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.runtime.jit import MockTensor

from bench.kernels.bench_decode import LABELS, codebooks_of, graph_time
from bench.kernels.decode_layers import Gate, GpuLayer, dense_output, routing
from pagedweight.kernels.call import Call
from pagedweight.kernels.fused_moe import launch_fused_moe
from pagedweight.kernels.ops import fused_moe
from pagedweight.kernels.prefill.config import PrefillConfig
from pagedweight.kernels.prefill.launch import (
    ProductLaunch,
    down_launch,
    gate_up_launch,
    launch_prefill_moe,
)
from pagedweight.kernels.prefill.prepare import Prepared, operand_columns
from pagedweight.kernels.routing import Grouping

CALLS = 3
DTYPE = torch.bfloat16
CANNOT_RUN = (ValueError, RuntimeError, triton.CompilationError, triton.runtime.errors.OutOfResources)


class Case(NamedTuple):
    shape: str
    label: str
    codebooks: str
    tokens: tuple[int, ...]
    configs: tuple[PrefillConfig, ...]
    dtype: torch.dtype = DTYPE

    @property
    def widths(self) -> tuple[int, ...]:
        return LABELS[self.label]

    @property
    def settings(self) -> set[PrefillConfig]:
        """Those that its calls will take."""
        return set(self.configs) or {BOTH}

    @property
    def planes(self) -> int:
        return max(6, self.widths[-1])


NARROW, WIDE, BOTH = PrefillConfig(tokens=64), PrefillConfig(few=128), PrefillConfig()
SHAPES_TIMED = ("qwen", "gemma", "mixtral")
SUITES = {
    "answers": (
        *(Case("odd", label, "fast", (3, 100, 700), (NARROW,)) for label in ("2", "3", "4", "5", "6", "8", "mixed")),
        *(Case("odd", label, "lut16", (100,), (NARROW,)) for label in ("3", "4", "6")),
        *(Case("odd", label, "fast", (100, 300), (BOTH,)) for label in ("3", "6", "mixed")),
        Case("odd", "6", "cubic", (100,), (NARROW,)),
        Case("odd", "4", "fast", (300,), ()),
    ),
    "bars": (
        Case("odd", "4", "fast", (100, 300), ()),
        Case("odd", "mixed", "fast", (100, 700), (BOTH,)),
        Case("odd", "mixed", "lut16", (100,), (NARROW,), torch.float16),
        *(
            Case(shape, label, "fast", (512, 2048), (BOTH, NARROW, WIDE) if label == "4" else (BOTH,))
            for label in ("4", "mixed", "6", "3")
            for shape in SHAPES_TIMED
        ),
    ),
    # Batches that the decode kernels serve too.
    "few": tuple(
        Case(
            shape,
            "4",
            "fast",
            (64, 32),
            (
                *(PrefillConfig(tokens=tokens, few=tokens) for tokens in (16, 32, 64)),
                PrefillConfig(tokens=32, few=16),
                PrefillConfig(rows=64, tokens=32, few=32),
            ),
        )
        for shape in SHAPES_TIMED
    ),
    # No settings of their own: the op, as users call it.
    "chosen": tuple(
        Case(shape, label, "fast", (128, 512, 2048), ()) for shape in SHAPES_TIMED for label in ("6", "mixed", "4", "3")
    ),
    "codebooks": tuple(
        Case("qwen", label, codebooks, (512, 2048), (BOTH,))
        for label, codebooks in (("3", "lut16"), ("4", "lut16"), ("6", "lut16"), ("6", "cubic"))
    ),
}


def product_launches(case: Case, config: PrefillConfig) -> list[ProductLaunch]:
    """A case's products over tensors without memory."""
    layer = GpuLayer.meta(case.shape, planes=case.planes)
    call = op_call(layer, case, routing(layer, 4, 0, case.dtype))
    grouping = Grouping(*(torch.empty(4, device="meta", dtype=torch.int32) for _ in Grouping._fields))
    x, h = (call.x.new_empty(4, operand_columns(columns)) for columns in (layer.hidden, layer.intermediate))
    totals = torch.empty(4, device="meta")
    prepared = Prepared(grouping, x, totals, totals, h)
    return [gate_up_launch(call, prepared, config)[-1], down_launch(call, prepared, totals, config)[-1]]


def compile_jobs(jobs: list[tuple[Case, PrefillConfig, int]]) -> list[str]:
    """Compile in this process; returns what failed and what spilled."""
    remarks = []
    for case, config, index in jobs:
        launch = product_launches(case, config)[index]
        arguments = {k: MockTensor(v.dtype) if isinstance(v, torch.Tensor) else v for k, v in launch.arguments.items()}
        try:
            launch.kernel.warmup(grid=(1,), **arguments)
        except CANNOT_RUN as error:
            remarks.append(f"{case[:3]} {config}: {str(error)[-300:]}")
    return remarks


def compile_all(cases: tuple[Case, ...], workers: int) -> None:
    start = time.time()
    jobs = [(case, config, index) for case in cases for config in case.settings for index in (0, 1)]
    # The slowest first: several widths, wide tiles.
    jobs.sort(key=lambda job: -len(job[0].widths) * sum({job[1].tokens, min(job[1].few, job[1].tokens)}))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        remarks = [r for part in pool.imap_unordered(compile_jobs, [[job] for job in jobs]) for r in part]
    print(f"compiled {len(jobs)} kernels in {time.time() - start:.0f} s", *remarks, sep="\n  ", flush=True)


def held_bytes(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def op_call(layer: GpuLayer, case: Case, batch: tuple[torch.Tensor, ...]) -> Call:
    return layer.call(batch, case.widths, codebooks_of(case.codebooks, case.widths), Gate())


def variants(case: Case, grouped: bool) -> Iterator[tuple[str, Callable[[Call], torch.Tensor]]]:
    for config in case.configs:
        name = f"rows {config.rows} tokens {config.tokens}/{config.few}"
        yield name, lambda call, config=config: launch_prefill_moe(call, config)
    if not case.configs:
        yield "chosen", lambda call: fused_moe(*call)
    if grouped:
        yield "grouped", launch_fused_moe


def measured(launch: Callable[[Call], torch.Tensor], calls: list[Call], wanted: torch.Tensor, timed: bool) -> dict:
    out = launch(calls[0])
    record = {"error": float((out.double() - wanted).norm() / wanted.norm())}
    record["equal"] = torch.equal(out, launch(calls[0]))  # equal inputs give equal bits
    record["memory"] = held_bytes(lambda: launch(calls[0]))
    if timed:
        record["us"] = graph_time(lambda: [launch(call) for call in calls], len(calls))
    return record


def run_case(case: Case, layer: GpuLayer, records: list[dict], timed: bool, grouped: bool) -> None:
    layer.commit(case.widths, codebooks_of(case.codebooks, case.widths), 0)
    batches = [routing(layer, max(case.tokens), i, case.dtype) for i in range(CALLS if timed else 1)]
    answer = dense_output(layer, *batches[0][:3])
    for tokens in case.tokens:
        calls = [op_call(layer, case, tuple(tensor[:tokens] for tensor in batch)) for batch in batches]
        wanted = answer[:tokens]
        for name, launch in variants(case, grouped):
            record = {"shape": case.shape, "tokens": tokens, "bits": case.label, "codebooks": case.codebooks}
            record |= {"dtype": str(case.dtype).removeprefix("torch."), "config": name}
            try:
                record |= measured(launch, calls, wanted, timed)
            except CANNOT_RUN as error:
                record["failed"] = repr(error)[:300]  # a setting that cannot run is a result
            records.append(record)
            print(*(f"{value:.3g}" if isinstance(value, float) else value for value in record.values()), flush=True)


def run_parts(case: Case, layer: GpuLayer, tokens: int) -> None:
    """Where the time goes: each kernel's share, from the profiler."""
    layer.commit(case.widths, codebooks_of(case.codebooks, case.widths), 0)
    call = op_call(layer, case, routing(layer, tokens, 0, case.dtype))
    for name, launch in variants(case, False):
        launch(call)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                launch(call)
            torch.cuda.synchronize()
        parts = {e.key[:28]: round(e.self_device_time_total / 5, 1) for e in profile.key_averages()}
        print("parts", case[:3], tokens, name, parts, flush=True)


def run_peers(records: list[dict], tokens: tuple[int, ...]) -> None:
    """vLLM's bf16 experts on the same routings."""
    from bench.kernels.peers import answer, bf16_peer

    for shape in SHAPES_TIMED:
        meta = GpuLayer.meta(shape)
        meta.device = "cuda"
        peer = bf16_peer(shape, 0)
        for count in tokens:
            calls = [routing(meta, count, i, DTYPE) for i in range(CALLS)]
            calls = [(x, ids.int(), weights) for x, ids, weights, _slots in calls]
            wanted = answer(peer, *calls[0])
            record = {"shape": shape, "tokens": count, "config": "vllm bf16"}
            record["error"] = float((peer.run(*calls[0]).double() - wanted).norm() / wanted.norm())
            record["memory"] = held_bytes(lambda peer=peer, calls=calls: peer.run(*calls[0]))
            record["us"] = graph_time(lambda peer=peer, calls=calls: [peer.run(*call) for call in calls], CALLS)
            records.append(record)
            print(*record.values(), flush=True)
        del peer, calls
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), nargs="*", default=["chosen"])
    parser.add_argument("--peers", action="store_true", help="time vLLM too; needs vLLM")
    parser.add_argument("--grouped", action="store_true", help="time the grouped kernels too")
    parser.add_argument("--parts", action="store_true", help="print each kernel's share")
    parser.add_argument(
        "--workers", type=int, default=min(14, os.cpu_count()), help="processes that compile first; 0: none"
    )
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache for the suites")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    records: list[dict] = []
    for suite in arguments.suite:
        cases = SUITES[suite]
        if arguments.workers:
            compile_all(cases, arguments.workers)
        if arguments.compile_only:
            continue
        for shape in dict.fromkeys(case.shape for case in cases):
            layer = None
            for case in (case for case in cases if case.shape == shape):
                layer = (
                    layer if layer and layer.planes == case.planes else GpuLayer.random(shape, 0, planes=case.planes)
                )
                run_case(case, layer, records, suite != "answers", arguments.grouped)
                if arguments.parts and suite != "answers" and case.label in ("4", "mixed"):
                    run_parts(case, layer, case.tokens[-1])
            del layer
            torch.cuda.empty_cache()
            _write(arguments.out, records)
    if arguments.peers:
        run_peers(records, (128, 512, 2048))
        _write(arguments.out, records)


def _write(path: Path | None, records: list[dict]) -> None:
    if path is not None:
        head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        head["command"] = "python " + " ".join(sys.argv)
        path.write_text(json.dumps({**head, "records": records}, indent=1))


if __name__ == "__main__":
    main()
