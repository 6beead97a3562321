"""The last step of the routed experts: every token's outputs, weighted and summed in fp32 in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagedweight.kernels.launch import cdiv, power_of_two

MOST_COLUMNS = 1024


@triton.jit(do_not_specialize=["stride_it", "stride_ia", "stride_wt", "stride_wa", "stride_ot"])
def weighted_sum_kernel(
    parts_ptr, ids_ptr, weights_ptr, out_ptr, stride_it, stride_ia, stride_wt, stride_wa, stride_ot,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one token. Grid (tokens, ceil(H / COLUMNS)). out = sum_a r_a sum_s part, in that
    order; zeros for a token without an expert. Parts of an id that is no expert may be anything, as may its weight."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for choice in tl.static_range(CHOICES):
        expert = tl.load(ids_ptr + token * stride_it + choice * stride_ia)
        expert = tl.where(column < HIDDEN, expert, -1)
        routed = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights_ptr + token * stride_wt + choice * stride_wa).to(tl.float32)
        for split in tl.static_range(SPLITS):
            row = (token * CHOICES + choice) * SPLITS + split
            part = tl.load(parts_ptr + row * HIDDEN + column, routed, other=0.0).to(tl.float32)
            total += tl.where(routed, weight * part, 0.0)
    tl.store(out_ptr + token * stride_ot + column, total.to(out_ptr.dtype.element_ty), column < HIDDEN)


def sum_launch(
    parts: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    out: torch.Tensor,
    experts: int,
    columns: int = MOST_COLUMNS,
    early: bool = False,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """(grid, arguments) of the launch that writes out (T, H) from parts (T * A, splits, H), fp32 or out's type.

    early: it starts while the launch that writes the parts ends (programmatic dependent launch).
    """
    tokens, hidden = out.shape
    columns = min(columns, power_of_two(hidden))
    arguments = {
        "parts_ptr": parts,
        "ids_ptr": expert_ids,
        "weights_ptr": expert_weights,
        "out_ptr": out,
        "stride_it": expert_ids.stride(0),
        "stride_ia": expert_ids.stride(1),
        "stride_wt": expert_weights.stride(0),
        "stride_wa": expert_weights.stride(1),
        "stride_ot": out.stride(0),
        "HIDDEN": hidden,
        "EXPERTS": experts,
        "CHOICES": expert_ids.shape[1],
        "SPLITS": parts.shape[1],
        "COLUMNS": columns,
        "PDL": early,
    }
    return (tokens, cdiv(hidden, columns)), arguments


def launch_weighted_sum(
    y: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, out: torch.Tensor, experts: int
) -> None:
    """Writes out (T, H) from y (T * A, H), fp32 or out's type; choices with an id outside [0, E) are left out."""
    grid, arguments = sum_launch(y[:, None], expert_ids, expert_weights, out, experts)
    weighted_sum_kernel[grid](**arguments)
