"""The last step of the routed experts: every token's outputs, weighted and summed in fp32 in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _weighted_sum_kernel(
    y_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    per_token,
    experts,
    stride_it,
    stride_ia,
    stride_wt,
    stride_wa,
    stride_ot,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one token x BLOCK outputs. Grid (T, H / BLOCK). out[t] = sum_a w[t, a] y[t, a], a in order.

    Choices with an id outside [0, E) are left out: their y was never written.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(0, per_token):
        expert = tl.load(ids_ptr + token * stride_it + choice * stride_ia)
        if (expert >= 0) & (expert < experts):
            weight = tl.load(weights_ptr + token * stride_wt + choice * stride_wa).to(tl.float32)
            total += weight * tl.load(y_ptr + (token * per_token + choice) * H + column, mask=inside, other=0.0)
    tl.store(out_ptr + token * stride_ot + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch_weighted_sum(
    y: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, out: torch.Tensor, experts: int
) -> None:
    """Writes out (T, H) from y (T * A, H), fp32 or out's type; choices with an id outside [0, E) are left out."""
    tokens, hidden = out.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _weighted_sum_kernel[(tokens, triton.cdiv(hidden, block))](
        y_ptr=y,
        ids_ptr=expert_ids,
        weights_ptr=expert_weights,
        out_ptr=out,
        per_token=expert_ids.shape[1],
        experts=experts,
        stride_it=expert_ids.stride(0),
        stride_ia=expert_ids.stride(1),
        stride_wt=expert_weights.stride(0),
        stride_wa=expert_weights.stride(1),
        stride_ot=out.stride(0),
        H=hidden,
        BLOCK=block,
    )
