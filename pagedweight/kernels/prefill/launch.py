"""Host side of the prefill path: routed experts for many tokens in a 16-bit type, on Hopper's tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from pagedweight.kernels.call import Call
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.kernels.prefill.assembly import has_line
from pagedweight.kernels.prefill.config import PrefillConfig
from pagedweight.kernels.prefill.down import _down_kernel
from pagedweight.kernels.prefill.gate_up import _gate_up_kernel
from pagedweight.kernels.prefill.prepare import Prepared, launch_prepare, operand_columns
from pagedweight.kernels.routing import Grouping, launch_routing
from pagedweight.kernels.weighted_sum import launch_weighted_sum

PAIRS_PER_LAUNCH = 1 << 16  # bounds the scratch of long prompts
LARGEST_OFFSET = (1 << 31) - 1  # of an element of x or h: kernels count in 32 bits


class ProductLaunch(NamedTuple):
    """One product's kernel launch; arguments by name."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self) -> None:
        self.kernel[(self.programs,)](**self.arguments)


def _arguments(call: Call, grouping: Grouping, config: PrefillConfig) -> dict[str, Any]:
    """What both launches take."""
    return {
        "pairs_ptr": grouping.pairs,
        "last_ptr": grouping.last,
        "tile_expert_ptr": grouping.tile_expert,
        "tile_first_ptr": grouping.tile_first,
        "bits_ptr": call.bits,
        "frame_ptr": call.frame_address,
        "table_ptr": call.table_address,
        "first_row": call.first_row,
        "H_STRIDE": operand_columns(call.intermediate),
        "HIDDEN": call.x.shape[1],
        "INTERMEDIATE": call.intermediate,
        "PLANES": call.frame_address.shape[1],
        "PLANE_FRAMES": call.frame_address.shape[2],
        "WIDTHS": tuple(call.widths),
        "CODEBOOKS": call.books,
        "ROWS": config.rows,
        "TOKENS": config.tokens,
        "FEW": min(config.few, config.tokens),
        "WARPS": config.rows // 16,
        "num_warps": config.rows // 16,
    }


def gate_up_launch(
    call: Call, prepared: Prepared, config: PrefillConfig
) -> tuple[torch.Tensor, torch.Tensor | None, ProductLaunch]:
    """(sums of squares of h (pairs, row tiles); sums of h, where a row's line needs them; the launch that fills them
    and h)."""
    row_tiles = triton.cdiv(call.intermediate, config.rows // (1 + call.gated))
    squares = torch.empty(len(prepared.h), row_tiles, dtype=torch.float32, device=prepared.h.device)
    totals = any(map(has_line, call.books))
    sums = torch.empty_like(squares) if totals else None
    geometry = plane_geometry((1 + call.gated) * call.intermediate, call.x.shape[1], call.frame_bytes)
    arguments = _arguments(call, prepared.grouping, config) | {
        "x_ptr": prepared.x,
        "h_ptr": prepared.h,
        "totals_ptr": prepared.totals,
        "squares_ptr": squares,
        # What is not needed is neither read nor written: any pointer will do.
        "sums_ptr": sums if totals else squares,
        "TOTALS": totals,
        "bias_ptr": call.bits if call.gate_up_bias is None else call.gate_up_bias,
        "BIAS": call.gate_up_bias is not None,
        "X_STRIDE": prepared.x.stride(0),
        "CHOICES": call.expert_ids.shape[1],
        "FRAME_ROWS": geometry.rows_per_frame,
        "ACTIVATION": call.activation,
        "GATED": call.gated,
        "LIMIT": call.limit,
    }
    return squares, sums, ProductLaunch(_gate_up_kernel, len(prepared.grouping.tile_expert) * row_tiles, arguments)


def down_launch(
    call: Call, prepared: Prepared, totals: torch.Tensor, config: PrefillConfig
) -> tuple[torch.Tensor, ProductLaunch]:
    """(y (pairs, H), not yet weighted; the launch that fills it). totals: fp32 (pairs,) sums of h, where needed."""
    hidden = call.x.shape[1]
    y = prepared.h.new_empty(len(prepared.h), hidden)
    arguments = _arguments(call, prepared.grouping, config) | {
        "h_ptr": prepared.h,
        "y_ptr": y,
        "totals_ptr": totals,
        "bias_ptr": call.bits if call.down_bias is None else call.down_bias,
        "BIAS": call.down_bias is not None,
        "FRAME_ROWS": plane_geometry(hidden, call.intermediate, call.frame_bytes).rows_per_frame,
    }
    programs = len(prepared.grouping.tile_expert) * triton.cdiv(hidden, config.rows)
    return y, ProductLaunch(_down_kernel, programs, arguments)


def launch_prefill_moe(call: Call, config: PrefillConfig | None = None) -> torch.Tensor:
    """`fused_moe` for many tokens on the current device. Deterministic; safe to capture in a CUDA graph.

    The op has checked the arguments. Outputs of a pair are rounded to x's type once before they are weighted and summed
    in fp32.
    """
    x = call.x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pairs = min(PAIRS_PER_LAUNCH, LARGEST_OFFSET // operand_columns(max(x.shape[1], call.intermediate)))
    step = max(1, pairs // call.expert_ids.shape[1])
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        _launch_part(call.tokens(part), config or PrefillConfig(), out[part])
    return out


def _launch_part(call: Call, config: PrefillConfig, out: torch.Tensor) -> None:
    ids, weights = call.expert_ids, call.expert_weights
    prepared = launch_prepare(call.x, ids, call.experts, call.intermediate, config.tokens)
    squares, sums, launch = gate_up_launch(call, prepared, config)
    launch.run()
    y, launch = down_launch(call, prepared, squares if sums is None else sums.sum(1), config)
    launch.run()
    launch_weighted_sum(y, ids, weights, out, call.experts)
    grouping = prepared.grouping
    launch_routing(weights, call.token_slot, grouping, prepared.norms, squares, call.stats, call.layer_index)
