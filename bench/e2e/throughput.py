"""Tokens/s and peak reserved memory of decoding at a real model's shape, every step one CUDA graph.

    python -m bench.e2e.throughput --model qwen --out bench/results/h200-throughput-qwen.json

1. One layer: the captured step at uniform and mixed widths against transformers' own experts over the same weights.
2. bf16 experts: transformers' grouped GEMM and batched GEMM, and vLLM's fused experts where vLLM is installed.
3. Each uniform width in an arena of exactly its bytes, and mixed widths in the same bytes, in turns.
4. Moving: beside the batch other sequences' KV cache grows in the same arena, a block or more each step, then leaves;
   against the same steps held still at the widths that were passed through.
Attention, router, shared expert and head are transformers' own in every row. Weights are random (bench/e2e/drawn.py),
the cache is full of random keys, and every step attends to all of it (bench/e2e/captured.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
import triton
from transformers import PreTrainedModel

from bench.e2e.captured import WHOLE_CACHE, CapturedDecoding, attend_to_whole_cache, compile_layers
from bench.e2e.drawn import Drawn, dense_model, draw, emptied
from bench.e2e.throughput_check import error_of, step_logits, twin_logits
from bench.e2e.throughput_moving import moving_row
from bench.e2e.throughput_peers import NO_TIME, register_peers
from pagedweight import RuntimeConfig
from pagedweight.integrations.kv_pool import sequence_frames

WIDTHS = (3, 4, 5, 6)
BUFFER_BYTES = 2**30
ERROR_LIMIT = 2e-2  # of the largest logit, in bf16
SETTLING_STEPS = 4
PEERS = ["HF grouped_mm", "HF batched_mm", "vLLM fused_experts", NO_TIME]


class Setting(NamedTuple):
    """Of every row. rounds: how often uniform and mixed take turns; steps: of each time.

    profiled: batches whose kernels are listed too. compiled: what is small in each layer is fused by torch.compile.
    """

    context_tokens: int
    steps: int
    rounds: int
    profiled: tuple[int, ...] = ()
    compiled: bool = False


def measured(decoding: CapturedDecoding, setting: Setting) -> list[float]:
    """Milliseconds a step, once per round."""
    decoding.milliseconds(SETTLING_STEPS)
    return [float(decoding.milliseconds(setting.steps).mean()) for _ in range(setting.rounds)]


def row_of(decoding: CapturedDecoding, experts: str, took: list[float], **more: object) -> dict:
    best = min(took)
    return {
        "experts": experts,
        "batch": decoding.batch,
        "tokens_per_second": 1e3 * decoding.batch / best,
        "step_ms": took,
        **more,
    }


def keep(results: dict, name: str, part: object, out: Path) -> None:
    """Write all that is there so far: a run that is cut off leaves what it has."""
    results[name] = part
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def kernels_of(decoding: CapturedDecoding, setting: Setting) -> dict:
    return {"kernels": decoding.kernels()} if decoding.batch in setting.profiled else {}


def fresh_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that there ever was
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved() if device.type == "cuda" else 0


def answers(name: str, device: str, batches: list[int], context_tokens: int) -> list[dict]:
    """Part 1. control: the same answer's distance from the twin at the widths before."""
    drawn = draw(name, 1, WIDTHS, device, BUFFER_BYTES if device == "cuda" else 0)
    drawn.model.set_attn_implementation(WHOLE_CACHE)
    model = without_hooks(drawn, drawn.resident_bytes()[WIDTHS[-1]])
    mixed, rows = np.random.default_rng(0).choice(WIDTHS, drawn.store.layout.rows), []
    for batch in batches:
        decoding, before = CapturedDecoding(model, batch, context_tokens), None
        for widths, bits in [("mixed", mixed)] + [(str(b), np.full_like(mixed, b)) for b in WIDTHS]:
            with model.pagedweight.held_at(bits):
                got, wanted = step_logits(decoding), twin_logits(drawn, decoding)
            row = {"batch": batch, "widths": widths, "error": error_of(got, wanted)}
            row |= {"ok": row["error"] <= ERROR_LIMIT}
            row |= {} if before is None else {"control": error_of(got, before)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            before = wanted
    return rows


def without_hooks(drawn: Drawn, budget_bytes: int, *, compiled: bool = False) -> PreTrainedModel:
    """Patched, and its boundary left to the caller: a captured step has none inside."""
    spare = sequence_frames(drawn.kv_layers, drawn.store.host.sizes.frame_bytes, RuntimeConfig().block_tokens)
    budget_bytes += spare * drawn.store.host.sizes.frame_bytes
    model = drawn.patched(RuntimeConfig(budget_bytes=budget_bytes))
    model.pagedweight.hooks.take_off()
    if compiled:
        compile_layers(model, experts_too=False)
    return model


def dense_rows(model: PreTrainedModel, peers: list[str], batches: list[int], setting: Setting) -> list[dict]:
    """Part 2."""
    rows = []
    for name, implementation in register_peers().items():
        if name not in peers:
            continue
        model.set_experts_implementation(implementation)
        if setting.compiled:
            compile_layers(model, experts_too=name.startswith("HF"))
        for batch in batches:
            fresh_peak(model.device)
            decoding = CapturedDecoding(model, batch, setting.context_tokens)
            took = measured(decoding, setting)
            rows.append(row_of(decoding, name, took, peak_reserved_bytes=peak_bytes(model.device)))
            print(json.dumps(rows[-1]), flush=True)
            rows[-1] |= kernels_of(decoding, setting)
            del decoding
    return rows


def paged_rows(drawn: Drawn, width: int, batches: list[int], setting: Setting) -> list[dict]:
    """Part 3, at the bytes of one uniform width: each batch alone for its peak memory, then all of them in turns."""
    model = without_hooks(drawn, drawn.resident_bytes()[width], compiled=setting.compiled)
    uniform, mixed = np.full(drawn.store.layout.rows, width), mixed_bits(drawn, width)
    kinds = {"uniform": uniform} if mixed is None else {"uniform": uniform, "mixed": mixed}
    peaks = {}
    with model.pagedweight.held_at(uniform):
        for batch in batches:
            fresh_peak(model.device)
            CapturedDecoding(model, batch, setting.context_tokens).milliseconds(SETTLING_STEPS)
            peaks[batch] = peak_bytes(model.device)
    decodings = [CapturedDecoding(model, batch, setting.context_tokens) for batch in batches]
    took, listed = taken_in_turns(decodings, kinds, setting)
    rows = []
    for decoding in decodings:
        for kind, bits in kinds.items():
            held = {"bits": float(bits.mean()), "weight_bytes": held_bytes(drawn, bits)}
            of_batch = {name: took[name, decoding.batch] for name in kinds}
            row = row_of(decoding, kind, of_batch[kind], width=width, peak_reserved_bytes=peaks[decoding.batch], **held)
            print(json.dumps(row | against(of_batch, kind)), flush=True)
            rows.append(row | against(of_batch, kind) | listed[kind, decoding.batch])
    return rows


def taken_in_turns(
    decodings: list[CapturedDecoding], kinds: dict[str, np.ndarray], setting: Setting
) -> tuple[dict[tuple[str, int], list[float]], dict[tuple[str, int], dict]]:
    """Milliseconds a step by kind and batch, once per round, and kernels."""
    model = decodings[0].model
    took: dict[tuple[str, int], list[float]] = {(kind, own.batch): [] for kind in kinds for own in decodings}
    listed = {}
    for at in range(setting.rounds):
        for kind, bits in kinds.items():
            with model.pagedweight.held_at(bits):
                for decoding in decodings:
                    took[kind, decoding.batch] += measured(decoding, setting._replace(rounds=1))
                    if at == setting.rounds - 1:
                        listed[kind, decoding.batch] = kernels_of(decoding, setting)
    return took, listed


def against(took: dict[str, list[float]], kind: str) -> dict[str, float]:
    """How much slower than uniform, the median of the rounds' ratios."""
    if kind == "uniform":
        return {}
    return {"slower_than_uniform": float(np.median(np.divide(took[kind], took["uniform"])) - 1)}


def held_bytes(drawn: Drawn, bits: np.ndarray) -> int:
    """Arena bytes of planes and tables."""
    sizes = drawn.store.host.sizes
    return int(sizes.resident_bytes()[np.arange(len(bits)), np.searchsorted(sizes.widths, bits)].sum())


def mixed_bits(drawn: Drawn, width: int) -> np.ndarray | None:
    """(R,): a third of the rows of each projection one bit up and a third one bit down, at random, then as many of the
    raised ones back as it takes to hold no more bytes than the uniform width. None at the lowest and highest width."""
    if width in (WIDTHS[0], WIDTHS[-1]):
        return None
    rng, rows = np.random.default_rng(width), drawn.store.layout.rows
    bits, raised = np.full(rows, width), []
    for projection in range(2):
        order = 2 * rng.permutation(rows // 2) + projection
        third = len(order) // 3
        bits[order[:third]] += 1
        bits[order[third : 2 * third]] -= 1
        raised.append(order[:third])
    limit = held_bytes(drawn, np.full(rows, width))
    for row in rng.permutation(np.concatenate(raised)):
        if held_bytes(drawn, bits) <= limit:
            break
        bits[row] = width
    return bits


def bars(rows: list[dict], dense: list[dict]) -> list[dict]:
    """Each width beside each kind of bf16 experts at the same batch."""
    return [
        {
            "batch": row["batch"],
            "width": row["width"],
            "against": other["experts"],
            "memory_saved": 1 - row["peak_reserved_bytes"] / max(1, other["peak_reserved_bytes"]),
            "times_tokens_per_second": row["tokens_per_second"] / other["tokens_per_second"],
        }
        for row in rows
        for other in dense
        if row["experts"] == "uniform" and row["batch"] == other["batch"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS, help="bf16 experts; vLLM's if installed")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["answers", "dense", "paged", "moving"])
    parser.add_argument("--profile", type=int, nargs="+", default=[], help="batches whose kernels are listed")
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
        "command": " ".join(["python -m bench.e2e.throughput", *sys.argv[1:]]),
    }
    checked = (
        answers(options.model, options.device, options.batches, options.context) if "answers" in options.parts else []
    )
    keep(results, "answers", checked, options.out)
    if not all(row["ok"] for row in checked):
        return 1
    if set(options.parts) == {"answers"}:
        return 0
    model = dense_model(options.model, options.layers, options.device)
    model.set_attn_implementation(WHOLE_CACHE)
    dense = dense_rows(model, options.peers, options.batches, setting) if "dense" in options.parts else []
    keep(results, "dense", dense, options.out)
    drawn, rows = emptied(model, WIDTHS, BUFFER_BYTES if options.device == "cuda" else 0), []
    for width in options.widths if "paged" in options.parts else []:
        rows += paged_rows(drawn, width, options.batches, setting)
        keep(results, "paged", rows, options.out)
        keep(results, "bars", bars(rows, dense), options.out)
    if "moving" in options.parts:
        budget = drawn.resident_bytes()[WIDTHS[-2]]
        model = without_hooks(drawn, budget, compiled=setting.compiled)
        moved = [moving_row(model, batch, setting.context_tokens) for batch in options.batches]
        keep(results, "moving", moved, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
