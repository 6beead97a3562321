"""Checks the kernels on one GPU at the true shapes of three models, against fp64, and times them; prints a table.

    python -m bench.gpu_check --out bench/results/h200-gpu-check.json

For each model, width set and batch: error of every path against fp64 in bf16 and fp16, and median milliseconds per MoE
layer beside plain bf16 experts (torch's grouped matrix product, its own sort included). Then, per model: capture with
host syncs forbidden, and replays after widths and frames changed and retired frames were poisoned, equal to eager.
Exit code 1 when any check fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch.nn import functional

from bench.gpu_layer import GpuLayer, dense_output, draw_batch
from bench.timing import capture, median_ms
from pagedweight.kernels.call import Call
from pagedweight.kernels.fused_moe import launch_fused_moe
from pagedweight.kernels.ops import fused_moe, launch_on_cuda
from pagedweight.kernels.reference import GATES
from pagedweight.kernels.regimes import choose_regime
from pagedweight.layout import MoeLayer

MODELS = {
    "Qwen1.5-MoE-A2.7B": (MoeLayer(0, 60, 2048, 1408, "silu"), 4),
    "Mixtral-8x7B": (MoeLayer(0, 8, 4096, 14336, "silu"), 2),
    "Gemma-4-26B-A4B": (MoeLayer(0, 128, 2816, 704, "gelu_tanh"), 8),
}
WIDTHS = (2, 3, 4, 5, 6)
BATCHES = (1, 3, 16, 64, 512)
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
TIMED_WIDTHS = ("2", "4", "6", "mixed")


class Errors(NamedTuple):
    """Relative errors: of norms, and the largest against the reference's largest."""

    norm: float
    largest: float

    @classmethod
    def of(cls, out: torch.Tensor, expected: torch.Tensor) -> Errors:
        difference = out.double() - expected
        return cls(float(difference.norm() / expected.norm()), float(difference.abs().max() / expected.abs().max()))

    def within(self, limit: float) -> bool:
        # Written so that NaN fails.
        return self.norm < limit and self.largest < limit


def dense_baseline(layer: GpuLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same layer with plain bf16 weights, as a grouped matrix product over tokens sorted by expert."""
    per_token = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(layer.shape.experts, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order // per_token], layer.dense_gate_up.mT, offs=ends).chunk(2, dim=-1)
    outputs = torch._grouped_mm(GATES[layer.shape.activation](gate) * up, layer.dense_down.mT, offs=ends)
    weighted = outputs * weights.flatten()[order, None].to(x.dtype)
    return functional.embedding_bag(order.argsort().view(ids.shape), weighted, mode="sum")


def check_case(layer: GpuLayer, tokens: int, per_token: int, label: str) -> list[dict[str, object]]:
    """Rows of results for one batch size at the layer's present widths."""
    batch = draw_batch(layer, tokens, per_token, seed=tokens)
    expected = dense_output(layer, batch)
    rows = []
    for dtype, limit in LIMITS.items():
        x = batch.x.to(dtype)
        paths = {"grouped": launch_fused_moe}
        regime = choose_regime(x)
        if regime is not launch_fused_moe:
            paths[regime.__name__.removeprefix("launch_").removesuffix("_moe")] = lambda call: fused_moe(*call)
        call = layer.call(x, batch)
        for path, launch in paths.items():
            errors = Errors.of(launch(call), expected)
            row = {"model": layer.name, "M": tokens, "widths": label, "dtype": str(dtype)[6:], "path": path}
            row |= {**errors._asdict(), "limit": limit, "ok": errors.within(limit)}
            if dtype is torch.bfloat16 and label in TIMED_WIDTHS:
                row["ms"] = median_ms(lambda launch=launch, call=call: launch(call), x.device)
            rows.append(row)
    return rows


def check_baseline(layer: GpuLayer, tokens: int, per_token: int) -> dict[str, object]:
    """One row of results for plain bf16 weights at one batch size."""
    batch = draw_batch(layer, tokens, per_token, seed=tokens)
    x = batch.x.bfloat16()
    errors = Errors.of(dense_baseline(layer, x, batch.ids, batch.weights), dense_output(layer, batch))
    row = {"model": layer.name, "M": tokens, "path": "bf16 grouped_mm", "widths": "16", **errors._asdict()}
    # Every intermediate is rounded to bf16 here: a looser limit than the kernels'.
    row["ok"] = errors.within(2e-2)
    row["ms"] = median_ms(lambda: dense_baseline(layer, x, batch.ids, batch.weights), x.device)
    return row


def check_graph(layer: GpuLayer, tokens: int, per_token: int) -> dict[str, object]:
    """A graph captured at mixed widths, replayed after everything behind its addresses changed."""
    batch = draw_batch(layer, tokens, per_token, seed=7)
    call = layer.call(batch.x.bfloat16(), batch)
    layer.set_bits(layer.mixed_bits(seed=1))
    out = torch.empty_like(call.x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = capture(lambda: out.copy_(fused_moe(*call)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    equal = []
    for seed in (2, 3):
        layer.set_bits(layer.mixed_bits(seed=seed), frame_seed=seed)
        layer.poison_retired_frames()
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        equal.append(torch.equal(replayed, fused_moe(*call)))
        equal.append(Errors.of(replayed, dense_output(layer, batch)).within(LIMITS[torch.bfloat16]))
    return {"model": layer.name, "M": tokens, "check": "graph", "ok": all(equal)}


def check_repeatable(layer: GpuLayer, tokens: int, per_token: int) -> dict[str, object]:
    """Twenty runs of one batch, bit for bit; and one token alone against the same token in the batch."""
    batch = draw_batch(layer, tokens, per_token, seed=9)
    call = layer.call(batch.x.bfloat16(), batch)
    first = fused_moe(*call)
    same = all(torch.equal(first, fused_moe(*call)) for _ in range(20))
    alone = fused_moe(*call.tokens(slice(0, 1)))
    errors = Errors.of(alone, first[:1].double())
    return {
        "model": layer.name,
        "M": tokens,
        "check": "repeatable",
        "ok": same and errors.within(LIMITS[torch.bfloat16]),
        "alone_bit_equal": torch.equal(alone, first[:1]),
    }


def check_statistics(layer: GpuLayer, tokens: int, per_token: int) -> dict[str, object]:
    """Mass, counts and features of one batch against fp64."""
    batch = draw_batch(layer, tokens, per_token, seed=11)
    layer.clear_statistics()
    fused_moe(*layer.call(batch.x.bfloat16(), batch))
    expected = layer.expected_statistics(batch)
    close = [
        bool(((actual.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()).item())
        for actual, wanted in zip(layer.stats, expected, strict=True)
    ]
    return {"model": layer.name, "M": tokens, "check": "statistics", "ok": all(close)}


def check_model(name: str, batches: tuple[int, ...], log: list[dict[str, object]]) -> None:
    """Every check of one model, added to the log; weights are drawn on the device once."""
    shape, per_token = MODELS[name]
    layer = GpuLayer(name, shape, WIDTHS)
    for label in (*map(str, WIDTHS), "mixed"):
        start = time.perf_counter()
        bits = layer.mixed_bits(seed=0) if label == "mixed" else torch.full((2 * shape.experts,), int(label))
        layer.set_bits(bits)
        for tokens in batches:
            log.extend(check_case(layer, tokens, per_token, label))
        print(f"{name} {label}: {time.perf_counter() - start:.1f} s", flush=True)
    layer.keep_dense()
    for tokens in batches:
        log.append(check_baseline(layer, tokens, per_token))
    layer.drop_dense()
    for tokens in (1, 16, 512):
        log.append(check_repeatable(layer, tokens, per_token))
        log.append(check_statistics(layer, tokens, per_token))
        log.append(check_graph(layer, tokens, per_token))


def compile_one(case: tuple[str, torch.dtype, int, Callable[[Call], torch.Tensor]]) -> None:
    """Runs one batch, so that its kernels are in Triton's cache on disk."""
    name, dtype, tokens, launch = case
    shape, per_token = MODELS[name]
    layer = GpuLayer(name, shape, WIDTHS)
    layer.set_bits(layer.mixed_bits(seed=0))
    batch = draw_batch(layer, tokens, per_token, seed=0)
    launch(layer.call(batch.x.to(dtype), batch))
    torch.cuda.synchronize()


def compile_all(models: list[str], batches: list[int], workers: int) -> None:
    """Kernels of every model, type and path, compiled by several processes: one alone would take minutes."""
    # The largest first: they take longest.
    cases = [
        (name, dtype, tokens, launch)
        for tokens in sorted(batches, reverse=True)
        for name in models
        for dtype in LIMITS
        for launch in (launch_on_cuda, launch_fused_moe)
    ]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_one, cases, chunksize=1)
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)


def print_table(log: list[dict[str, object]]) -> None:
    """The log in words, by model: worst errors, milliseconds, and the outcome of each check."""
    for model in MODELS:
        rows = [row for row in log if row["model"] == model]
        print(f"\n{model}: worst relative error over all widths (norm, largest); then ms per layer by widths")
        for dtype in ("bfloat16", "float16"):
            for path in ("grouped", "decode"):
                chosen = [r for r in rows if r.get("dtype") == dtype and r.get("path") == path]
                if chosen:
                    worst = max(r["norm"] for r in chosen), max(r["largest"] for r in chosen)
                    failed = sum(not r["ok"] for r in chosen)
                    print(f"  {dtype} {path}: {worst[0]:.1e} {worst[1]:.1e}, {len(chosen)} cases, {failed} failed")
        for path in ("grouped", "decode", "bf16 grouped_mm"):
            for row_tokens in BATCHES:
                timed = [r for r in rows if r.get("path") == path and r["M"] == row_tokens and "ms" in r]
                if timed:
                    print(f"  {path} M={row_tokens}: " + ", ".join(f"{r['widths']}: {r['ms']:.4f}" for r in timed))
        for row in rows:
            if "check" in row:
                alone = (
                    f"; alone as in the batch, bit for bit: {row['alone_bit_equal']}"
                    if "alone_bit_equal" in row
                    else ""
                )
                print(f"  {row['check']} M={row['M']}: {'ok' if row['ok'] else 'FAILED'}{alone}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="compiling processes")
    options = parser.parse_args()
    batches = " ".join(map(str, options.batches))
    log: list[dict[str, object]] = []
    start = time.perf_counter()
    compile_all(options.models, options.batches, options.workers)
    for name in options.models:
        check_model(name, tuple(options.batches), log)
    failed = [row for row in log if not row.get("ok", True)]
    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "command": f"python -m bench.gpu_check --models {' '.join(options.models)} --batches {batches}",
        "seconds": round(time.perf_counter() - start, 1),
        "failed": len(failed),
        "rows": log,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print_table(log)
    for row in failed:
        print("FAILED", row)
    print(f"{len(log)} rows, {len(failed)} failed, {record['seconds']} s on {record['gpu']}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
