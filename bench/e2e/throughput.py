"""Tokens/s and peak reserved memory of decoding at a real model's shape, every step one CUDA graph.

    python -m bench.e2e.throughput --model qwen --out bench/results/h200-throughput-qwen-lut16.json

1. One layer: the captured step at uniform and mixed widths against transformers' own experts over the same weights.
2. bf16 experts: transformers' grouped GEMM and batched GEMM; where vLLM is installed its fused experts, in bf16 and
   Marlin's in 4 bits; and no experts at all.
3. Each uniform width in an arena of exactly its bytes, and mixed widths in the same bytes, in turns.
4. Moving: beside the batch other sequences' KV cache grows in the same arena, a block or more each step, then leaves;
   against the same steps held still at the widths that were passed through.
5. Generate: the model as a user calls it, step by step and without graphs, in bf16 and at each width; "compiled
   generate": as transformers compiles it, into CUDA graphs, where the cache is static.
compile: the kernels alone, side by side, so that what is timed later finds them.
--compiled: torch.compile fuses what is small in each layer, of bf16 and of ours alike, before the step is captured.
Attention, router, shared expert (unless --shared) and head are transformers' own in every row. Weights are random
(bench/e2e/drawn.py), the cache is full of random keys, and every step attends to all of it (bench/e2e/captured.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

from bench.e2e.captured import WHOLE_CACHE, attend_to_whole_cache
from bench.e2e.drawn import Drawn, dense_model
from bench.e2e.throughput_check import answers
from bench.e2e.throughput_generate import (
    dense_compiled_rows,
    dense_generate_rows,
    paged_compiled_rows,
    paged_generate_rows,
)
from bench.e2e.throughput_moving import moving_row
from bench.e2e.throughput_pages import PAGES, drawn_of, one_layer, other_pages
from bench.e2e.throughput_peers import FUSED, GROUPED, MARLIN, NO_TIME
from bench.e2e.throughput_rows import Setting, bars, dense_rows, marlin_rows, paged_rows, without_hooks
from pagedweight.compiling import compile_kernels
from pagedweight.evaluation.record import command

STARTED = time.perf_counter()
PEERS = [GROUPED, "HF batched_mm", FUSED, MARLIN, NO_TIME]


class Record:
    """What has been measured so far, written after every part: a run that is cut off leaves what it has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._out = options.out
        self.parts: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "versions": [torch.__version__, triton.__version__, transformers.__version__],
            "command": command("python -m bench.e2e.throughput"),
            "model": options.model,
            "layers": options.layers,
            "context_tokens": options.context,
            "shared": options.shared,
            "compiled": options.compiled,
        }

    def keep(self, name: str, part: object) -> None:
        self.parts[name] = part
        print(f"{name}: {time.perf_counter() - STARTED:.1f} s", flush=True)
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.parts, indent=1) + "\n")


def compiled_step(options: argparse.Namespace, codebooks: str) -> int:
    """Compile what the batches launch, and call it once in a model of one layer; how many launches."""
    setting, drawn = setting_of(options), one_layer(options.model, codebooks, options.device, shared=options.shared)
    model = without_hooks(drawn, drawn.store.layout.widths[-1])
    launches = compile_kernels(model, options.batches)
    for batch in options.batches:
        setting.decoding(model, batch).milliseconds(2)
    return launches


def measure(options: argparse.Namespace, record: Record) -> None:
    """Parts 2 to 5."""
    setting, model = setting_of(options), dense_model(options.model, options.layers, options.device)
    model.set_attn_implementation(WHOLE_CACHE)
    dense = dense_rows(model, options.peers, options.batches, setting) if "dense" in options.parts else []
    record.keep("dense", dense)
    if "generate" in options.parts:
        record.keep("generate", dense_generate_rows(model, options.batches, setting))
    if "compiled generate" in options.parts:
        record.keep("compiled generate", dense_compiled_rows(model, options.peers, options.batches, setting))
    if set(options.parts) <= {"answers", "dense"} and MARLIN not in options.peers:
        return
    drawn = drawn_of(model, options.codebooks[0], shared=options.shared)
    if "dense" in options.parts and MARLIN in options.peers and find_spec("vllm") is not None:
        dense += marlin_rows(drawn, options.batches, setting)
        record.keep("dense", dense)
    for at, name in enumerate(options.codebooks):
        if at:
            drawn = other_pages(drawn, name)
        measure_pages(options, record, drawn, name)


def measure_pages(options: argparse.Namespace, record: Record, drawn: Drawn, codebooks: str) -> None:
    """Parts 3 to 5 with one kind of pages."""
    setting, parts = setting_of(options), record.parts
    with torch.compiler.set_stance("force_eager"):
        ahead = compile_kernels(without_hooks(drawn, options.widths[0]), options.batches)
    print(f"{ahead} launches compiled: {time.perf_counter() - STARTED:.1f} s", flush=True)

    def add(name: str, rows: list[dict]) -> None:
        record.keep(name, parts.get(name, []) + [row | {"codebooks": codebooks} for row in rows])

    for width in options.widths if "paged" in options.parts else []:
        add("paged", paged_rows(drawn, width, options.batches, setting))
        record.keep("bars", bars(parts["paged"], parts["dense"]))
        if "moving" in options.parts and "moving" not in parts:
            model = without_hooks(drawn, 5)
            add("moving", [moving_row(setting.decoding(model, batch)) for batch in options.batches])
    for width in options.widths if "generate" in options.parts else []:
        add("generate", paged_generate_rows(drawn, width, options.batches, setting))
    for width in options.widths if "compiled generate" in options.parts else []:
        add("compiled generate", paged_compiled_rows(drawn, width, options.batches, setting))


def setting_of(options: argparse.Namespace) -> Setting:
    return Setting(options.context, options.steps, options.rounds, tuple(options.profile), options.compiled)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS, help="vLLM's if installed")
    parser.add_argument("--widths", type=int, nargs="+", default=[3, 4, 5, 6])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["answers", "dense", "paged", "moving"])
    parser.add_argument("--profile", type=int, nargs="+", default=[], help="batches whose kernels, memory are listed")
    parser.add_argument("--codebooks", nargs="+", default=["lut16"], choices=list(PAGES))
    parser.add_argument("--shared", action="store_true", help="page the shared expert with the routed ones")
    parser.add_argument("--compiled", action="store_true", help="torch.compile every layer; not of generate's rows")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.compiled and {"generate", "compiled generate"} & set(options.parts):
        parser.error("--compiled is of captured steps: run generate's parts without it")
    return options


def main() -> int:
    options = arguments()
    attend_to_whole_cache()
    if options.device == "cuda":
        # Otherwise weights of 8 MiB stand two by two in segments of 20, and a tenth of the memory is for nothing.
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    record = Record(options)
    if options.parts == ["compile"]:
        record.keep("compiled launches", [compiled_step(options, name) for name in options.codebooks])
        return 0
    checked = []
    if "answers" in options.parts:
        for name in options.codebooks:
            drawn = one_layer(options.model, name, options.device, shared=options.shared)
            checked += [row | {"codebooks": name} for row in answers(drawn, options.batches, setting_of(options))]
    record.keep("answers", checked)
    if not all(row["ok"] for row in checked):
        return 1
    if set(options.parts) != {"answers"}:
        measure(options, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
