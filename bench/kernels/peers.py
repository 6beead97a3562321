"""What vLLM would run instead, on the same shapes and routings: its bf16 Triton experts and Marlin's int4 ones.

Needs vLLM (measured with 0.20.1). Weights are drawn here, packed by vLLM's own functions, and answers checked against
fp64 of the very values that were packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import fused_experts
from vllm.model_executor.layers.fused_moe.fused_marlin_moe import fused_marlin_moe
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_permute_scales
from vllm.scalar_type import scalar_types

from bench.kernels.decode_layers import SHAPES


class Peer(NamedTuple):
    """run(x, ids, weights) -> (T, H); dense(projection, expert) -> (N, K) fp64, what the weights stand for."""

    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    dense: Callable[[int, int], torch.Tensor]


def bf16_peer(shape: str, seed: int) -> Peer:
    hidden, intermediate, experts, _choices = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(seed)
    matrices = [
        torch.randn(experts, *size, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(0.02)
        for size in ((2 * intermediate, hidden), (hidden, intermediate))
    ]

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return fused_experts(x, *matrices, weights, ids)

    return Peer(run, lambda projection, expert: matrices[projection][expert].double())


class _Int4Matrix:
    """One projection of every expert: codes of 4 bits around 8, a bf16 scale for each `group` of a row's columns."""

    def __init__(self, experts: int, rows: int, columns: int, group: int, generator: torch.Generator) -> None:
        options = {"generator": generator, "device": "cuda"}
        self.group = group
        self.codes = torch.randint(0, 16, (experts, columns, rows), dtype=torch.uint8, **options)
        self.scales = (0.003 + 0.003 * torch.rand(experts, columns // group, rows, **options)).bfloat16()
        shifts = 4 * torch.arange(8, device="cuda", dtype=torch.int32)[:, None]
        packed = torch.stack(
            [(codes.view(-1, 8, rows).int() << shifts).sum(1, dtype=torch.int32) for codes in self.codes]
        )
        unordered = torch.empty((experts, 0), dtype=torch.int32, device="cuda")
        self.weight = ops.gptq_marlin_moe_repack(packed, unordered, columns, rows, 4)
        self.marlin_scales = marlin_moe_permute_scales(self.scales, columns, rows, group)

    def dense(self, expert: int) -> torch.Tensor:
        scales = self.scales[expert].double().repeat_interleave(self.group, 0)
        return ((self.codes[expert].double() - 8) * scales).T


def marlin_peer(shape: str, seed: int) -> Peer:
    hidden, intermediate, experts, _choices = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(seed)
    group = 128 if intermediate % 128 == 0 else 64
    gate_up = _Int4Matrix(experts, 2 * intermediate, hidden, group, generator)
    down = _Int4Matrix(experts, hidden, intermediate, group, generator)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        scales = (gate_up.marlin_scales, down.marlin_scales)
        kind = scalar_types.uint4b8.id
        return fused_marlin_moe(x, gate_up.weight, down.weight, None, None, *scales, weights, ids, kind)

    return Peer(run, lambda projection, expert: (gate_up, down)[projection].dense(expert))


PEERS = {"vllm bf16": bf16_peer, "vllm marlin int4": marlin_peer}


def answer(peer: Peer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's output in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in set(ids.flatten().tolist()):
        token, choice = torch.where(ids == expert)
        gate, up = (x[token].double() @ peer.dense(0, expert).T).chunk(2, 1)
        h = torch.nn.functional.silu(gate) * up
        out.index_add_(0, token, (h @ peer.dense(1, expert).T) * weights[token, choice, None].double())
    return out
