"""Experts to compare with, as transformers' experts implementations under names of their own."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import nn
from transformers.integrations.moe import (
    ExpertsInterface,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

GROUPED = "HF grouped_mm"
NOT_COMPILED = f"{GROUPED}, not compiled"
FUSED = "vLLM fused_experts"
NO_TIME = "experts in no time"
MARLIN = "vLLM Marlin int4"
MARLIN_GROUP = 128  # columns that share a scale


def register_peers() -> dict[str, str]:
    """Name in the results: name of the experts implementation. vLLM's only where vLLM is installed.

    Names of our own, since generate exchanges "grouped_mm" for another while it decodes. NO_TIME: what no experts at
    all leave, which no kernel of experts can come below.
    """
    peers = {
        GROUPED: grouped_mm_experts_forward,
        "HF batched_mm": batched_mm_experts_forward,
        NO_TIME: passed_by,
    }
    if find_spec("vllm") is not None:
        peers |= {FUSED: vllm_experts_forward, MARLIN: marlin_experts_forward}
    names = {name: name.lower().replace(" ", "_") + "_bf16" for name in peers}
    for name, forward in peers.items():
        ExpertsInterface.register(names[name], forward)
    return names


def passed_by(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return hidden_states
    # No id is negative, but the compiler would drop a router that nobody asks.
    nothing = torch.where(top_k_index < 0, top_k_weights, 0).sum(-1, keepdim=True)
    return hidden_states + nothing.to(hidden_states.dtype)


@torch.compiler.disable
def vllm_experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe import fused_experts

    weights = (experts.gate_up_proj, experts.down_proj)
    return fused_experts(hidden_states, *weights, top_k_weights.float(), top_k_index)


def put_int4(modules: Iterable[nn.Module], hidden: int, intermediate: int, experts: int, device: torch.device) -> None:
    """Random codes and scales in Marlin's order, 4 bits and a bf16 scale for MARLIN_GROUP columns, on each module."""

    def drawn(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (experts, columns // 16, 2 * rows)
        codes = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device=device)
        scales = torch.empty(experts, columns // MARLIN_GROUP, rows, dtype=torch.bfloat16, device=device)
        return codes, scales.uniform_(0.003, 0.006)

    for module in modules:
        module.int4 = (*drawn(2 * intermediate, hidden), *drawn(hidden, intermediate))


@torch.compiler.disable
def marlin_experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe.fused_marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    gate_up, gate_up_scales, down, down_scales = experts.int4
    weights = (gate_up, down, None, None, gate_up_scales, down_scales)
    return fused_marlin_moe(hidden_states, *weights, top_k_weights.float(), top_k_index, scalar_types.uint4b8.id)
