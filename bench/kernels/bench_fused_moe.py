"""fused_moe per MoE layer, against plain bf16 experts on the GPU: `pytest bench/kernels/bench_fused_moe.py`.

Answers are checked against fp64 first. Without a GPU the shapes are tiny and the twin is timed.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from bench.gpu_check import LIMITS, MODELS, WIDTHS, Errors, dense_baseline
from bench.gpu_layer import GpuLayer, dense_output, draw_batch
from pagedweight.kernels.ops import fused_moe
from pagedweight.layout import MoeLayer

HAS_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


class Case(NamedTuple):
    model: str
    tokens: int
    widths: str

    def __str__(self) -> str:
        return f"{self.model}-M{self.tokens}-{self.widths}"


if HAS_GPU:
    SHAPES = MODELS
    CASES = [Case(model, tokens, widths) for model in MODELS for tokens in (1, 16, 512) for widths in ("4", "mixed")]
else:
    SHAPES = {"tiny": (MoeLayer(0, 16, 192, 128, "silu"), 4)}
    CASES = [Case("tiny", tokens, widths) for tokens in (1, 64) for widths in ("4", "mixed")]


def build(case: Case, device: torch.device) -> GpuLayer:
    layer = GpuLayer(case.model, SHAPES[case.model][0], WIDTHS, device=device)
    rows = 2 * layer.shape.experts
    layer.set_bits(layer.mixed_bits(seed=0) if case.widths == "mixed" else torch.full((rows,), int(case.widths)))
    return layer


def finished(call: object) -> object:
    """The call, done when it returns."""

    def run() -> None:
        call()
        if HAS_GPU:
            torch.cuda.synchronize()

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def bench_fused_moe(case: Case, device: torch.device, benchmark: object) -> None:
    layer = build(case, device)
    batch = draw_batch(layer, case.tokens, SHAPES[case.model][1], seed=0)
    call = layer.call(batch.x.to(DTYPE), batch)
    limit = LIMITS.get(DTYPE, 1e-3)
    assert Errors.of(fused_moe(*call), dense_output(layer, batch)).within(limit)
    active = batch.ids.unique().tolist()
    benchmark.extra_info["plane_bytes"] = sum(
        int(layer.tables.bits[2 * e + u]) * layer.geometry[u].rows * layer.geometry[u].columns // 8
        for e in active
        for u in (0, 1)
    )
    benchmark(finished(lambda: fused_moe(*call)))


@pytest.mark.skipif(not HAS_GPU, reason="the baseline is CUDA's grouped matrix product")
@pytest.mark.parametrize("case", [case for case in CASES if case.widths == "4"], ids=str)
def bench_plain_bf16(case: Case, device: torch.device, benchmark: object) -> None:
    layer = build(case, device)
    batch = draw_batch(layer, case.tokens, SHAPES[case.model][1], seed=0)
    layer.keep_dense()
    x = batch.x.bfloat16()
    out = dense_baseline(layer, x, batch.ids, batch.weights)
    assert Errors.of(out, dense_output(layer, batch)).within(2e-2)
    benchmark(finished(lambda: dense_baseline(layer, x, batch.ids, batch.weights)))
