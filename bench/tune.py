"""Which launch settings to time for which case; `bench/kernels/bench_decode.py` runs them."""

from __future__ import annotations

import torch

from bench.kernels.bench_decode import Case
from pagedweight.kernels.decode.config import DecodeConfig, ProductConfig


def P(rows, chunks=1, splits=1, warps=4, stages=3, registers=None):  # noqa: N802
    return ProductConfig(rows, chunks, splits, warps, stages, registers)


def around(tokens: int, ups, downs, int8=False, both=False) -> list[DecodeConfig]:
    """Each first launch with the first of the second launches, then the other way round, then without early launch."""
    configs = [DecodeConfig(up, downs[0], tokens, int8, True) for up in ups]
    configs += [DecodeConfig(ups[0], down, tokens, int8, True) for down in downs[1:]]
    return configs + [DecodeConfig(ups[0], downs[0], tokens, int8, False)] * both


def third_sweep() -> list[Case]:
    one = around(1, [P(8, 4), P(4, 4, 1, 2), P(16, 1, 1, 2)], [P(64, 1, 3), P(32, 1, 3, 2), P(16, 4)], int8=True)
    gemma_one = around(1, [P(16, 1, 1, 2), P(8, 2, 1, 2), P(32)], [P(32, 2), P(32, 1, 2, 2), P(64, 1, 2)], int8=True)
    mixtral_one = around(1, [P(32), P(16, 1, 1, 2)], [P(64, splits=2), P(64, splits=4), P(32, 1, 4, 2)], int8=True)
    four = around(4, [P(32), P(16, 1, 1, 2)], [P(64), P(32, 1, 1, 2)], int8=True)
    four += [DecodeConfig(P(32, registers=128), P(64, registers=128), 4, True, True)]
    eight = [DecodeConfig(P(32), P(64), 8, True, True), DecodeConfig(P(32, registers=128), P(64, registers=128), 8, True, True)]
    split = [DecodeConfig(P(32), P(64, splits=4), 4, True, True)]
    gemma_many = four + [DecodeConfig(P(32), P(64, splits=2), 4, True, True), DecodeConfig(P(32), P(64), 2, True, True)]
    cases = []
    for label in ("3", "4", "6", "mixed"):
        cases.append(Case("qwen", 1, label, "fast", one))
        cases += [Case("qwen", m, label, "fast", {4: four[:3], 16: four + eight[:1], 64: eight}[m]) for m in (4, 16, 64)]
        cases += [Case("mixtral", 1, label, "fast", mixtral_one), Case("mixtral", 4, label, "fast", four[:1] + split), Case("mixtral", 16, label, "fast", eight)]
        cases += [Case("gemma", 1, label, "fast", gemma_one), Case("gemma", 16, label, "fast", gemma_many)]
    for label in ("3", "4"):
        cases.append(Case("qwen", 1, label, "fast", one[:1], "whole"))
        cases.append(Case("qwen", 16, label, "fast", four[:1], "whole"))
    cases.append(Case("qwen", 16, "3", "lut16", [DecodeConfig(P(32), P(64), 4, False, True)]))
    return odd_cases() + cases


def odd_cases() -> list[Case]:
    """Every width and codebook, ragged shapes and token counts: for the answers, not the times."""
    one = [DecodeConfig(P(16, 1, 1, 2), P(32, 1, 1, 2), 1), DecodeConfig(P(16, 2), P(64), 1, False, True)]
    one8 = [DecodeConfig(P(16, 1, 1, 2), P(32, 1, 1, 2), 1, True, True), DecodeConfig(P(8, 4), P(64), 1, True, True)]
    many = [DecodeConfig(P(32, stages=2), P(64, stages=2), 8, False, True)]
    many8 = [DecodeConfig(P(32), P(64), 8, True, True), DecodeConfig(P(16, 1, 1, 2), P(32, 1, 1, 2), 4, True)]
    cases = [Case("odd", 1, "all", books, one) for books in ("lut16", "fast", "cubic")]
    cases += [Case("odd", 1, "all", "fast", one8), Case("odd", 1, "all", "cubic", one[:1], dtype=torch.float16)]
    cases += [Case("odd", m, "all", books, many) for m in (3, 33) for books in ("lut16", "fast", "cubic")]
    cases += [Case("odd", m, "all", "fast", many8) for m in (2, 17, 64)]
    cases += [Case("odd", 5, "all", books, many, dtype=torch.float16) for books in ("lut16", "fast", "cubic")]
    return cases


def compact_sweep() -> list[Case]:
    """What the other sweeps left open, most valuable first."""
    one = [DecodeConfig(P(8, 4), P(64, 1, 3), 1, True, True), DecodeConfig(P(16, 1, 1, 2), P(64, 1, 3), 1, True, True)]
    eight = [DecodeConfig(P(32), P(64), 8, True, True)]
    two_warps = [DecodeConfig(P(16, 1, 1, 2), P(32, 1, 1, 2), 4, True, True)]
    gemma_one = [DecodeConfig(P(16, 1, 1, 2), d, 1, True, True) for d in (P(32, 2), P(64, 1, 2))]
    fast_one = [DecodeConfig(P(8, 4), P(64), 1, True, True)]
    cases = [Case("odd", 1, "all", "fast", fast_one), Case("odd", 17, "all", "fast", eight)]
    cases += [Case("odd", 1, "all", "cubic", [DecodeConfig(P(16, 2), P(64), 1, False, True)])]
    for label in ("4", "3", "6", "mixed"):
        cases += [Case("qwen", 1, label, "fast", one), Case("qwen", 64, label, "fast", eight)]
        cases += [Case("qwen", 16, label, "fast", eight + two_warps), Case("qwen", 4, label, "fast", two_warps)]
    cases += [Case("gemma", 1, label, "fast", gemma_one) for label in ("3", "4", "6", "mixed")]
    cases += [Case("gemma", 16, label, "fast", two_warps) for label in ("3", "4", "6", "mixed")]
    cases += [Case("mixtral", 16, label, "fast", eight) for label in ("4", "3")]
    cases += [Case("mixtral", 1, "4", "fast", [DecodeConfig(P(32), P(64, splits=2), 1, True, True)])]
    return cases


def suite(name: str) -> list[Case]:
    return {"third": third_sweep, "odd": odd_cases, "compact": compact_sweep}[name]()
