"""Inputs in the stored column order of planes, once per batch, so that weights never move."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedweight.kernels.codes import column_at
from pagedweight.kernels.device_order import row_words


@triton.jit
def _permute_kernel(
    x_ptr, stored_ptr, norms_ptr, stride_xt, stride_xk, stride_st, K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one token. Grid (T,). Writes its inputs in stored order (zero at padding) and its 2-norm."""
    STORED: tl.constexpr = (K + 63) // 64 * 64
    token = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, STORED, BLOCK):
        position = first + tl.arange(0, BLOCK)
        column = column_at(position, K)
        inside = position < STORED
        x = tl.load(x_ptr + token * stride_xt + column * stride_xk, mask=inside & (column < K), other=0.0)
        tl.store(stored_ptr + token * stride_st + position, x, mask=inside)
        x = x.to(tl.float32)
        squares += x * x
    tl.store(norms_ptr + token, tl.sqrt(tl.sum(squares, 0)))


def launch_permute(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) inputs in stored order, (T, 32 * words), zero at padding; and their fp32 2-norms (T,)."""
    tokens, columns = x.shape
    stored = x.new_empty(tokens, 32 * row_words(columns))
    norms = torch.empty(tokens, dtype=torch.float32, device=x.device)
    _permute_kernel[(tokens,)](
        x_ptr=x,
        stored_ptr=stored,
        norms_ptr=norms,
        stride_xt=x.stride(0),
        stride_xk=x.stride(1),
        stride_st=stored.stride(0),
        K=columns,
        BLOCK=min(1024, triton.next_power_of_2(stored.shape[1])),
    )
    return stored, norms
