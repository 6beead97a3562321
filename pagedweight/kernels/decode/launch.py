"""Host side of the decode path: routed experts for up to 64 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedweight.kernels.decode.config import MAX_TOKENS, DecodeConfig
from pagedweight.kernels.decode.launches import Call, decode_launches
from pagedweight.kernels.launch import split_codebooks


def can_decode(x: torch.Tensor) -> bool:
    """Whether this path serves the batch: at most 64 tokens in a 16-bit type."""
    return 0 < x.shape[0] <= MAX_TOKENS and x.dtype in (torch.float16, torch.bfloat16)


def launch_decode_moe(
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
    config: DecodeConfig | None = None,
    use_ptx: bool | None = None,
) -> torch.Tensor:
    """out[t] = sum_a r[t, a] expert_{id[t, a]}(x[t]) for up to 64 tokens; adds to mass, counts and features.

    Arguments as `fused_moe`'s. use_ptx: decode with inline PTX; by default on NVIDIA GPUs from Ampere on. Scratch comes
    from torch's allocator; nothing waits for the host. ValueError when config cannot run.
    """
    call = Call(
        x, expert_ids, expert_weights, token_slot, bits, frame_address, table_address, mass, counts, features,
        layer_index, first_row, experts, intermediate, frame_bytes, activation, tuple(widths),
        split_codebooks(codebooks, widths), config, use_ptx, gated, limit, gate_up_bias, down_bias,
    )  # fmt: skip
    out, launches = decode_launches(call)
    for launch in launches:
        launch.run()
    return out
