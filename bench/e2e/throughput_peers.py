"""bf16 experts to compare with, as transformers' experts implementations under names of their own."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn
from transformers.integrations.moe import (
    ExpertsInterface,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

NO_TIME = "experts in no time"


def register_peers() -> dict[str, str]:
    """Name in the results: name of the experts implementation. vLLM's only where vLLM is installed.

    Names of our own, since generate exchanges "grouped_mm" for another while it decodes. NO_TIME: what no experts at
    all leave, which no kernel of experts can come below.
    """
    peers = {
        "HF grouped_mm": grouped_mm_experts_forward,
        "HF batched_mm": batched_mm_experts_forward,
        NO_TIME: passed_by,
    }
    if find_spec("vllm") is not None:
        peers["vLLM fused_experts"] = vllm_experts_forward
    names = {name: name.lower().replace(" ", "_") + "_bf16" for name in peers}
    for name, forward in peers.items():
        ExpertsInterface.register(names[name], forward)
    return names


def passed_by(experts: nn.Module, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    return hidden_states


def vllm_experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe import fused_experts

    weights = (experts.gate_up_proj, experts.down_proj)
    return fused_experts(hidden_states, *weights, top_k_weights.float(), top_k_index)
