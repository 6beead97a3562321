"""Routed experts over paged planes for batches of any size: permute, group, gate_up, down, weighted sum, statistics."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagedweight.kernels.codes import operand_type
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.kernels.grouped import Gate, GroupedLaunch, launch_down, launch_gate_up
from pagedweight.kernels.launch import LaunchConfig, choose, shared_limit, split_codebooks
from pagedweight.kernels.permute import launch_permute
from pagedweight.kernels.routing import launch_group, launch_routing
from pagedweight.kernels.weighted_sum import launch_weighted_sum
from pagedweight.layout import BlockTables, RoutingStats

# Bounds the scratch of long prompts: 2^16 pairs of 4096 fp32 outputs are 1 GiB.
PAIRS_PER_LAUNCH = 1 << 16


def launch_fused_moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor,
    bits: torch.Tensor,
    frame_address: torch.Tensor,
    table_address: torch.Tensor,
    memory: torch.Tensor,
    mass: torch.Tensor,
    counts: torch.Tensor,
    features: torch.Tensor,
    layer_index: int,
    first_row: int,
    experts: int,
    intermediate: int,
    frame_bytes: int,
    activation: str,
    widths: list[int],
    codebooks: str,
    gated: bool = True,
    limit: float = 0.0,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
) -> torch.Tensor:
    """`fused_moe` by the grouped kernels, for any number of tokens, on the current device.

    Deterministic; safe to capture in a CUDA graph. The op has checked the arguments.
    """
    tables, stats = BlockTables(bits, frame_address, table_address, memory), RoutingStats(mass, counts, features)
    books = dict(zip(widths, split_codebooks(codebooks, widths), strict=True))
    gate = Gate(activation, gated, limit, gate_up_bias, down_bias)
    tokens, per_token = expert_ids.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    config = config or choose(experts, tokens * per_token, x.element_size(), shared_limit(x.device))
    step = max(1, PAIRS_PER_LAUNCH // per_token)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        _launch_part(
            x[part],
            expert_ids[part],
            expert_weights[part],
            token_slot[part],
            tables,
            stats,
            out[part],
            config,
            layer_index=layer_index,
            first_row=first_row,
            experts=experts,
            intermediate=intermediate,
            frame_bytes=frame_bytes,
            codebooks=books,
            gate=gate,
        )
    return out


def _launch_part(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor,
    tables: BlockTables,
    stats: RoutingStats,
    out: torch.Tensor,
    config: LaunchConfig,
    *,
    layer_index: int,
    first_row: int,
    experts: int,
    intermediate: int,
    frame_bytes: int,
    codebooks: Mapping[int, str],
    gate: Gate,
) -> None:
    gate_up = plane_geometry((1 + gate.gated) * intermediate, x.shape[1], frame_bytes)
    down = plane_geometry(x.shape[1], intermediate, frame_bytes)
    grouping = launch_group(expert_ids, experts, config.block_m)
    launch = GroupedLaunch(tables, grouping, config, operand_type(x.dtype), first_row, codebooks, gate)
    stored, norms = launch_permute(x)
    inner, squares = launch_gate_up(stored, launch, gate_up, intermediate, expert_ids.numel())
    y = launch_down(inner, launch, down, expert_ids.numel())
    launch_weighted_sum(y, expert_ids, expert_weights, out, experts)
    launch_routing(expert_weights, token_slot, grouping, norms, squares, stats, layer_index)
