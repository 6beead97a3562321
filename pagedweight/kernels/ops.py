"""The registered op pagedweight::fused_moe: Triton kernels on CUDA, the torch twin on the CPU.

The dispatcher chooses by device. Importing this module needs no Triton; launching on CUDA does.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedweight.kernels.checks import check_arguments
from pagedweight.kernels.reference import fused_moe_reference


@torch.library.custom_op("pagedweight::fused_moe", mutates_args=("mass", "counts", "features"), device_types=("cuda",))
def fused_moe(
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
) -> torch.Tensor:
    """One MoE layer's routed experts over paged planes; adds to the routing statistics.

    out[t] = sum_a w[t, a] * (down_e combine(gate_up_e x[t] + b_e) + c_e) with e = expert_ids[t, a], summed in fp32;
    `reference.combine` says what an activation does to gate and up.

    Args:
        x: (T, H) fp32, fp16 or bf16; any strides.
        expert_ids: (T, A) int32 or int64; ids outside [0, E) add nothing and are not counted.
        expert_weights: (T, A) routing weights r, floating point.
        token_slot: (T,) int32 request slots; -1 is not counted.
        bits, frame_address, table_address, memory: layout.BlockTables; read on the device, never from the host.
        mass, counts, features: layout.RoutingStats, added to.
        layer_index: the layer's place in the statistics; first_row: the table row of (expert 0, gate_up).
        experts, intermediate: E and I. frame_bytes: size of a frame. activation: one of layout.ACTIVATIONS.
        widths: supported widths, ascending. codebooks: theirs, as `launch.join_codebooks` makes it.
        gated: whether gate_up has gate rows before its up rows. limit: of the activations in layout.LIMITED, else 0.
        gate_up_bias: b, (E, 2I), or (E, I) without a gate; down_bias: c, (E, H); floating point, contiguous, or None.

    Returns (T, H) in x.dtype. Raises ValueError when the arguments do not fit each other.
    """
    arguments = (
        x, expert_ids, expert_weights, token_slot, bits, frame_address, table_address, memory, mass, counts, features,
        layer_index, first_row, experts, intermediate, frame_bytes, activation, widths, codebooks, gated, limit,
        gate_up_bias, down_bias,
    )  # fmt: skip
    check_arguments(*arguments)
    return launch_on_cuda(*arguments)


@fused_moe.register_kernel("cpu")
def _fused_moe_cpu(*arguments: Any) -> torch.Tensor:
    check_arguments(*arguments)
    return fused_moe_reference(*arguments)


@fused_moe.register_fake
def _fused_moe_fake(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def launch_on_cuda(x: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
    """The Triton kernels of the batch's regime; the arguments are fused_moe's. ImportError without Triton."""
    # Not at the top: where Triton has no wheel, everything but this launch must work.
    from pagedweight.kernels.regimes import choose_regime

    # Triton launches on the current device; make that the tensors' own.
    with torch.cuda.device(x.device):
        return choose_regime(x)(x, *arguments, **named)
