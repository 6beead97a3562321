"""Host side of the prefill path: routed experts for many tokens in a 16-bit type, on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from pagedweight.kernels.device_order import plane_geometry
from pagedweight.kernels.launch import split_codebooks
from pagedweight.kernels.prefill.config import PrefillConfig
from pagedweight.kernels.prefill.down import _down_kernel
from pagedweight.kernels.prefill.gate_up import _gate_up_kernel
from pagedweight.kernels.prefill.prepare import Prepared, launch_prepare, operand_columns
from pagedweight.kernels.routing import Grouping, launch_routing
from pagedweight.kernels.weighted_sum import launch_weighted_sum
from pagedweight.layout import RoutingStats

PAIRS_PER_LAUNCH = 1 << 16  # bounds the scratch of long prompts
LARGEST_OFFSET = (1 << 31) - 1  # of an element of x or h: kernels count in 32 bits


class ProductLaunch(NamedTuple):
    """One product's kernel launch; arguments by name."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self) -> None:
        self.kernel[(self.programs,)](**self.arguments)


class Layer(NamedTuple):
    """What both launches read of a layer."""

    bits: torch.Tensor
    frame_address: torch.Tensor
    table_address: torch.Tensor
    first_row: int
    hidden: int
    intermediate: int
    frame_bytes: int
    activation: str
    widths: tuple[int, ...]
    codebooks: tuple[str, ...]
    gated: bool
    limit: float
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def arguments(self, grouping: Grouping, config: PrefillConfig) -> dict[str, Any]:
        return {
            "pairs_ptr": grouping.pairs,
            "last_ptr": grouping.last,
            "tile_expert_ptr": grouping.tile_expert,
            "tile_first_ptr": grouping.tile_first,
            "bits_ptr": self.bits,
            "frame_ptr": self.frame_address,
            "table_ptr": self.table_address,
            "first_row": self.first_row,
            "H_STRIDE": operand_columns(self.intermediate),
            "HIDDEN": self.hidden,
            "INTERMEDIATE": self.intermediate,
            "PLANES": self.frame_address.shape[1],
            "PLANE_FRAMES": self.frame_address.shape[2],
            "WIDTHS": self.widths,
            "CODEBOOKS": self.codebooks,
            "ROWS": config.rows,
            "TOKENS": config.tokens,
            "FEW": min(config.few, config.tokens),
            "WARPS": config.rows // 16,
            "num_warps": config.rows // 16,
        }


def gate_up_launch(
    layer: Layer, prepared: Prepared, choices: int, config: PrefillConfig
) -> tuple[torch.Tensor, ProductLaunch]:
    """(sums of squares of h (pairs, row tiles), the launch that fills them and h)."""
    row_tiles = triton.cdiv(layer.intermediate, config.rows // (1 + layer.gated))
    squares = torch.empty(len(prepared.h), row_tiles, dtype=torch.float32, device=prepared.h.device)
    geometry = plane_geometry((1 + layer.gated) * layer.intermediate, layer.hidden, layer.frame_bytes)
    arguments = layer.arguments(prepared.grouping, config) | {
        "x_ptr": prepared.x,
        "h_ptr": prepared.h,
        "squares_ptr": squares,
        # Without a bias any pointer will do: it is not read.
        "bias_ptr": layer.bits if layer.gate_up_bias is None else layer.gate_up_bias,
        "BIAS": layer.gate_up_bias is not None,
        "X_STRIDE": prepared.x.stride(0),
        "CHOICES": choices,
        "FRAME_ROWS": geometry.rows_per_frame,
        "ACTIVATION": layer.activation,
        "GATED": layer.gated,
        "LIMIT": layer.limit,
    }
    return squares, ProductLaunch(_gate_up_kernel, len(prepared.grouping.tile_expert) * row_tiles, arguments)


def down_launch(layer: Layer, prepared: Prepared, config: PrefillConfig) -> tuple[torch.Tensor, ProductLaunch]:
    """(y (pairs, H), not yet weighted; the launch that fills it)."""
    y = prepared.h.new_empty(len(prepared.h), layer.hidden)
    geometry = plane_geometry(layer.hidden, layer.intermediate, layer.frame_bytes)
    arguments = layer.arguments(prepared.grouping, config) | {
        "h_ptr": prepared.h,
        "y_ptr": y,
        "bias_ptr": layer.bits if layer.down_bias is None else layer.down_bias,
        "BIAS": layer.down_bias is not None,
        "FRAME_ROWS": geometry.rows_per_frame,
    }
    programs = len(prepared.grouping.tile_expert) * triton.cdiv(layer.hidden, config.rows)
    return y, ProductLaunch(_down_kernel, programs, arguments)


def launch_prefill_moe(
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
    widths: Sequence[int],
    codebooks: str,
    gated: bool = True,
    limit: float = 0.0,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """`fused_moe` for many tokens on the current device. Deterministic; safe to capture in a CUDA graph.

    The op has checked the arguments. Outputs of a pair are rounded to x's type once before they are weighted and summed
    in fp32.
    """
    layer = Layer(
        bits, frame_address, table_address, first_row, x.shape[1], intermediate, frame_bytes, activation,
        tuple(widths), split_codebooks(codebooks, widths), gated, limit, gate_up_bias, down_bias,
    )  # fmt: skip
    stats = RoutingStats(mass, counts, features)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    config = config or PrefillConfig()
    pairs = min(PAIRS_PER_LAUNCH, LARGEST_OFFSET // operand_columns(max(x.shape[1], intermediate)))
    step = max(1, pairs // expert_ids.shape[1])
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        batch = (x[part], expert_ids[part], expert_weights[part], token_slot[part], out[part])
        _launch_part(layer, stats, config, experts, layer_index, *batch)
    return out


def _launch_part(
    layer: Layer,
    stats: RoutingStats,
    config: PrefillConfig,
    experts: int,
    layer_index: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor,
    out: torch.Tensor,
) -> None:
    prepared = launch_prepare(x, expert_ids, experts, layer.intermediate, config.tokens)
    squares, launch = gate_up_launch(layer, prepared, expert_ids.shape[1], config)
    launch.run()
    y, launch = down_launch(layer, prepared, config)
    launch.run()
    launch_weighted_sum(y, expert_ids, expert_weights, out, experts)
    launch_routing(expert_weights, token_slot, prepared.grouping, prepared.norms, squares, stats, layer_index)
