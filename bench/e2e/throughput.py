"""Tokens/s and peak reserved memory of decoding at a real model's shape, every step one CUDA graph.

    python -m bench.e2e.throughput --model qwen --out bench/results/h200-throughput-qwen.json

1. One layer: the captured step at uniform and mixed widths against transformers' own experts over the same weights.
2. bf16 experts: transformers' grouped GEMM and batched GEMM; where vLLM is installed its fused experts, in bf16 and
   Marlin's in 4 bits; and no experts at all.
3. Each uniform width in an arena of exactly its bytes, and mixed widths in the same bytes, in turns.
4. Moving: beside the batch other sequences' KV cache grows in the same arena, a block or more each step, then leaves;
   against the same steps held still at the widths that were passed through.
5. Generate: the model as a user calls it, step by step and without graphs, in bf16 and at each width.
compile: the kernels alone, side by side, so that what is timed later finds them.
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

import numpy as np
import torch
import transformers
import triton
from transformers import PreTrainedModel

from bench.e2e.captured import WHOLE_CACHE, CapturedDecoding, attend_to_whole_cache
from bench.e2e.drawn import Drawn, dense_model, emptied
from bench.e2e.throughput_check import error_of, step_logits, twin_logits
from bench.e2e.throughput_generate import dense_generate_rows, paged_generate_rows
from bench.e2e.throughput_moving import moving_row
from bench.e2e.throughput_peers import MARLIN, NO_TIME
from bench.e2e.throughput_rows import (
    Setting,
    bars,
    dense_rows,
    marlin_rows,
    paged_rows,
    without_hooks,
)
from pagedweight.compiling import compile_kernels
from pagedweight.evaluation.record import command
from pagedweight.shared_experts import fold_shared_experts

STARTED = time.perf_counter()
BUFFER_BYTES = 2**30
ERROR_LIMIT = 2e-2  # of the largest logit, in bf16
FAST = {3: "lut8", 4: "lut8", 5: "affine", 6: "affine"}
# Widths of a checkpoint and their codebooks, lut16 where none is given.
PAGES = {
    "lut16": ((3, 4, 5, 6), {}),
    "lut16 from 2 bits": ((2, 3, 4, 5, 6), {}),
    "fast": ((3, 4, 5, 6), FAST),
    "fast from 2 bits": ((2, 3, 4, 5, 6), FAST | {2: "lut8"}),
}
PEERS = ["HF grouped_mm", "HF batched_mm", "vLLM fused_experts", MARLIN, NO_TIME]


def keep(results: dict, name: str, part: object, out: Path) -> None:
    """Write all that is there so far: a run that is cut off leaves what it has."""
    results[name] = part
    print(f"{name}: {time.perf_counter() - STARTED:.1f} s", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def answers(
    name: str, device: str, batches: list[int], context_tokens: int, codebooks: str, *, shared: bool
) -> list[dict]:
    """Part 1. control: the same answer's distance from the twin at the widths before."""
    drawn = drawn_of(dense_model(name, 1, device), codebooks, shared=shared)
    drawn.model.set_attn_implementation(WHOLE_CACHE)
    widths = drawn.store.layout.widths
    model = without_hooks(drawn, drawn.resident_bytes()[widths[-1]])
    mixed, rows = np.random.default_rng(0).choice(widths, drawn.store.layout.rows), []
    for batch in batches:
        decoding, before = CapturedDecoding(model, batch, context_tokens), None
        for kind, bits in [("mixed", mixed)] + [(str(b), np.full_like(mixed, b)) for b in widths]:
            with model.pagedweight.held_at(bits):
                got, wanted = step_logits(decoding), twin_logits(drawn, decoding)
            row = {"batch": batch, "widths": kind, "error": error_of(got, wanted)}
            row |= {"ok": row["error"] <= ERROR_LIMIT}
            row |= {} if before is None else {"control": error_of(got, before)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            before = wanted
    return rows


def compiled_step(name: str, codebooks: str, options: argparse.Namespace) -> int:
    """Compile what the batches launch, and call it once in a model of one layer; how many launches."""
    drawn = drawn_of(dense_model(name, 1, options.device), codebooks, shared=options.shared)
    drawn.model.set_attn_implementation(WHOLE_CACHE)
    model = without_hooks(drawn, drawn.resident_bytes()[drawn.store.layout.widths[-1]])
    launches = compile_kernels(model, options.batches)
    for batch in options.batches:
        CapturedDecoding(model, batch, options.context).milliseconds(2)
    return launches


def drawn_of(model: PreTrainedModel, codebooks: str, *, shared: bool) -> Drawn:
    """shared: the shared expert is paged with the routed ones."""
    if shared:
        fold_shared_experts(model)
    device = model.device
    drawn = emptied(model, PAGES[codebooks][0], BUFFER_BYTES if device.type == "cuda" else 0, PAGES[codebooks][1])
    if device.type == "cuda":
        # A model that is loaded without experts has no holes where they were: to the host and back.
        model.cpu()
        torch.cuda.empty_cache()
        model.to(device)
    return drawn


def main() -> int:
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
    parser.add_argument("--profile", type=int, nargs="+", default=[], help="batches whose kernels are listed")
    parser.add_argument("--codebooks", nargs="+", default=["lut16"], choices=list(PAGES))
    parser.add_argument("--shared", action="store_true", help="page the shared expert with the routed ones")
    parser.add_argument("--compiled", action="store_true", help="fuse what is small in each layer by torch.compile")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    attend_to_whole_cache()
    if options.device == "cuda":
        # Otherwise weights of 8 MiB stand two by two in segments of 20, and a tenth of the memory is for nothing.
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    setting = Setting(options.context, options.steps, options.rounds, tuple(options.profile), options.compiled)
    results = {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": [torch.__version__, triton.__version__, transformers.__version__],
        "command": command("python -m bench.e2e.throughput"),
        "model": options.model,
        "layers": options.layers,
        "context_tokens": options.context,
        "shared": options.shared,
        "compiled": options.compiled,
    }
    if options.parts == ["compile"]:
        compiled = [compiled_step(options.model, name, options) for name in options.codebooks]
        keep(results, "compiled launches", compiled, options.out)
        return 0
    checked = []
    if "answers" in options.parts:
        place = options.device, options.batches, options.context
        checked = [
            row | {"codebooks": name}
            for name in options.codebooks
            for row in answers(options.model, *place, name, shared=options.shared)
        ]
    keep(results, "answers", checked, options.out)
    if not all(row["ok"] for row in checked):
        return 1
    if set(options.parts) == {"answers"}:
        return 0
    model = dense_model(options.model, options.layers, options.device)
    model.set_attn_implementation(WHOLE_CACHE)
    dense = dense_rows(model, options.peers, options.batches, setting) if "dense" in options.parts else []
    keep(results, "dense", dense, options.out)
    called = dense_generate_rows(model, options.batches, setting) if "generate" in options.parts else []
    keep(results, "generate", called, options.out)
    drawn, rows = drawn_of(model, options.codebooks[0], shared=options.shared), []
    if "dense" in options.parts and MARLIN in options.peers and find_spec("vllm") is not None:
        dense += marlin_rows(drawn, options.batches, setting)
        keep(results, "dense", dense, options.out)
    for at, name in enumerate(options.codebooks):
        if at:
            drawn = drawn.with_pages(*PAGES[name], BUFFER_BYTES if options.device == "cuda" else 0)
        if options.device == "cuda":
            ahead = compile_kernels(without_hooks(drawn, drawn.resident_bytes()[options.widths[0]]), options.batches)
            print(f"{ahead} launches compiled: {time.perf_counter() - STARTED:.1f} s", flush=True)
        for width in options.widths if "paged" in options.parts else []:
            rows += [row | {"codebooks": name} for row in paged_rows(drawn, width, options.batches, setting)]
            keep(results, "paged", rows, options.out)
            keep(results, "bars", bars(rows, dense), options.out)
            if "moving" in options.parts and "moving" not in results:
                model = without_hooks(drawn, drawn.resident_bytes()[5], compiled=setting.compiled)
                moved = [moving_row(model, batch, setting.context_tokens) for batch in options.batches]
                keep(results, "moving", [row | {"codebooks": name} for row in moved], options.out)
        for width in options.widths if "generate" in options.parts else []:
            called += [row | {"codebooks": name} for row in paged_generate_rows(drawn, width, options.batches, setting)]
            keep(results, "generate", called, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
