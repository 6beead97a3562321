"""Routed experts over paged planes for batches of any size: permute, group, gate_up, down, weighted sum, statistics."""

from __future__ import annotations

import torch

from pagedweight.kernels.call import Call
from pagedweight.kernels.codes import operand_type
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.kernels.grouped import Gate, GroupedLaunch, launch_down, launch_gate_up
from pagedweight.kernels.launch import LaunchConfig, choose, shared_limit
from pagedweight.kernels.permute import launch_permute
from pagedweight.kernels.routing import launch_group, launch_routing
from pagedweight.kernels.weighted_sum import launch_weighted_sum

# Bounds the scratch of long prompts: 2^16 pairs of 4096 fp32 outputs are 1 GiB.
PAIRS_PER_LAUNCH = 1 << 16


def launch_fused_moe(call: Call, config: LaunchConfig | None = None) -> torch.Tensor:
    """`fused_moe` by the grouped kernels, for any number of tokens, on the current device.

    Deterministic; safe to capture in a CUDA graph. The op has checked the arguments.
    """
    x = call.x
    tokens, per_token = call.expert_ids.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    config = config or choose(call.experts, tokens * per_token, x.element_size(), shared_limit(x.device))
    step = max(1, PAIRS_PER_LAUNCH // per_token)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        _launch_part(call.tokens(part), config, out[part])
    return out


def _launch_part(call: Call, config: LaunchConfig, out: torch.Tensor) -> None:
    x, ids = call.x, call.expert_ids
    gate_up = plane_geometry((1 + call.gated) * call.intermediate, x.shape[1], call.frame_bytes)
    down = plane_geometry(x.shape[1], call.intermediate, call.frame_bytes)
    gate = Gate(call.activation, call.gated, call.limit, call.gate_up_bias, call.down_bias)
    grouping = launch_group(ids, call.experts, config.block_m)
    books = dict(zip(call.widths, call.books, strict=True))
    launch = GroupedLaunch(call.tables, grouping, config, operand_type(x.dtype), call.first_row, books, gate)
    stored, norms = launch_permute(x)
    inner, squares = launch_gate_up(stored, launch, gate_up, call.intermediate, ids.numel())
    y = launch_down(inner, launch, down, ids.numel())
    launch_weighted_sum(y, ids, call.expert_weights, out, call.experts)
    launch_routing(call.expert_weights, call.token_slot, grouping, norms, squares, call.stats, call.layer_index)
