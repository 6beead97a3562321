"""The launch before the products: pairs by expert, inputs in operand order with their norms, padding of h."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagedweight.kernels.device_order import BLOCK_COLUMNS
from pagedweight.kernels.routing import Grouping


def operand_columns(columns: int) -> int:
    """Columns in operand order: whole blocks, but half a block where the tail has at most 8 words."""
    blocks, tail = divmod(columns, BLOCK_COLUMNS)
    if tail > BLOCK_COLUMNS // 2:
        return BLOCK_COLUMNS * (blocks + 1)
    return BLOCK_COLUMNS * blocks + (BLOCK_COLUMNS // 2 if tail else 0)


@triton.jit
def _load_ids(ids_ptr, pair, n_pairs, CHOICES: tl.constexpr, stride_it, stride_ia):
    at = ids_ptr + (pair // CHOICES).to(tl.int64) * stride_it + pair % CHOICES * stride_ia
    return tl.load(at, mask=pair < n_pairs, other=-1)


@triton.jit
def _group_expert(
    ids_ptr, pairs_ptr, first_ptr, last_ptr, tile_expert_ptr, tile_first_ptr, expert, experts, n_pairs, tiles,
    stride_it, stride_ia, CHOICES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `routing._group_kernel`, for one expert."""
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n_pairs, BLOCK):
        ids = _load_ids(ids_ptr, start + lane, n_pairs, CHOICES, stride_it, stride_ia)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    first = tl.sum(lower, 0)
    count = tl.sum(own, 0)
    tl.store(first_ptr + expert, first)
    tl.store(last_ptr + expert, first + count)
    placed = first
    for start in range(0, n_pairs, BLOCK):
        mine = (_load_ids(ids_ptr, start + lane, n_pairs, CHOICES, stride_it, stride_ia) == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0)
        tl.store(pairs_ptr + placed + rank - 1, start + lane, mask=mine > 0)
        placed += tl.max(rank, 0)
    tile_start = first // TOKENS + expert
    tile_end = tl.where(expert == experts - 1, tiles, (first + count) // TOKENS + expert + 1)
    for start in range(tile_start, tile_end, BLOCK):
        tile = start + lane
        begins = (tile - tile_start) * TOKENS
        tl.store(tile_expert_ptr + tile, tl.where(begins < count, expert, -1), mask=tile < tile_end)
        tl.store(tile_first_ptr + tile, first + begins, mask=tile < tile_end)


@triton.jit
def _spread_token(
    x_ptr, spread_ptr, norms_ptr, totals_ptr, h_ptr, token, stride_xt, stride_xk, CHOICES: tl.constexpr,
    K: tl.constexpr, SPREAD: tl.constexpr, H_COLUMNS: tl.constexpr, H_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = K // 512 * 512
    WIDTH: tl.constexpr = (K % 512 + 63) // 64 * 2
    SPREAD_WIDTH: tl.constexpr = 8 if WIDTH <= 8 else 16
    POSITIONS: tl.constexpr = FULL + 32 * SPREAD_WIDTH * (WIDTH > 0)
    squares = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, POSITIONS, BLOCK):
        position = first + tl.arange(0, BLOCK)
        within = position - FULL
        word = within % SPREAD_WIDTH
        tail = tl.where(word < WIDTH, FULL + within // SPREAD_WIDTH * WIDTH + word, K)
        column = tl.where(within < 0, position, tail)
        x = tl.load(x_ptr + token * stride_xt + column * stride_xk, mask=column < K, other=0.0)
        if SPREAD:
            tl.store(spread_ptr + token * POSITIONS + position, x, mask=position < POSITIONS)
        x = x.to(tl.float32)
        squares += x * x
        total += x
    tl.store(norms_ptr + token, tl.sqrt(tl.sum(squares, 0)))
    tl.store(totals_ptr + token, tl.sum(total, 0))
    if H_STRIDE > H_COLUMNS:
        # Padding is multiplied by weights of padding columns: any finite number, times zero.
        TAIL: tl.constexpr = H_STRIDE - H_COLUMNS // 512 * 512
        H_WIDTH: tl.constexpr = (H_COLUMNS % 512 + 63) // 64 * 2
        within = tl.arange(0, TAIL)
        row = within // (TAIL // 32)
        word = within % (TAIL // 32)
        padding = (word >= H_WIDTH) | (row * H_WIDTH + word >= H_COLUMNS % 512)
        for choice in tl.static_range(CHOICES):
            at = h_ptr + (token * CHOICES + choice) * H_STRIDE + (H_STRIDE - TAIL) + within
            tl.store(at, tl.zeros((TAIL,), h_ptr.dtype.element_ty), mask=padding)


@triton.jit(do_not_specialize=["n_pairs", "tiles"])
def _prepare_kernel(
    x_ptr, spread_ptr, norms_ptr, totals_ptr, h_ptr, ids_ptr, pairs_ptr, first_ptr, last_ptr, tile_expert_ptr,
    tile_first_ptr, n_pairs, tiles, stride_xt, stride_xk, stride_it, stride_ia,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr, H_COLUMNS: tl.constexpr,
    H_STRIDE: tl.constexpr, TOKENS: tl.constexpr, PAIR_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one expert's pairs and tiles, or one token's inputs. Grid (EXPERTS + T,)."""
    program = tl.program_id(0)
    if program < EXPERTS:
        _group_expert(
            ids_ptr, pairs_ptr, first_ptr, last_ptr, tile_expert_ptr, tile_first_ptr, program, EXPERTS, n_pairs, tiles,
            stride_it, stride_ia, CHOICES, TOKENS, PAIR_BLOCK,
        )  # fmt: skip
    else:
        _spread_token(
            x_ptr, spread_ptr, norms_ptr, totals_ptr, h_ptr, (program - EXPERTS).to(tl.int64), stride_xt, stride_xk,
            CHOICES, K, SPREAD, H_COLUMNS, H_STRIDE, BLOCK,
        )  # fmt: skip


class Prepared(NamedTuple):
    """What the products take.

    x: (T, H in operand order), the caller's own where that is its order. norms, totals: fp32 (T,) 2-norms and sums of
    the inputs.
    h: (T * A, I in operand order), zero at padding, else unwritten.
    """

    grouping: Grouping
    x: torch.Tensor
    norms: torch.Tensor
    totals: torch.Tensor
    h: torch.Tensor


def launch_prepare(
    x: torch.Tensor, expert_ids: torch.Tensor, experts: int, intermediate: int, tile_tokens: int
) -> Prepared:
    """Groups the pairs in tiles of `tile_tokens` and orders the inputs; ids outside [0, E) are left out."""
    (tokens, columns), pairs = x.shape, expert_ids.numel()
    tiles = pairs // tile_tokens + experts
    grouping = Grouping(
        *(torch.empty(size, dtype=torch.int32, device=x.device) for size in (pairs, experts, experts, tiles, tiles))
    )
    # Copies of 16 bytes need rows that begin at multiples of 16.
    spread = columns != operand_columns(columns) or not x.is_contiguous() or x.data_ptr() % 16 > 0
    stored = x.new_empty(tokens, operand_columns(columns)) if spread else x
    norms, totals = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    h = x.new_empty(pairs, operand_columns(intermediate))
    _prepare_kernel[(experts + tokens,)](
        x_ptr=x,
        spread_ptr=stored,
        norms_ptr=norms,
        totals_ptr=totals,
        h_ptr=h,
        ids_ptr=expert_ids,
        pairs_ptr=grouping.pairs,
        first_ptr=grouping.first,
        last_ptr=grouping.last,
        tile_expert_ptr=grouping.tile_expert,
        tile_first_ptr=grouping.tile_first,
        n_pairs=pairs,
        tiles=tiles,
        stride_xt=x.stride(0),
        stride_xk=x.stride(1),
        stride_it=expert_ids.stride(0),
        stride_ia=expert_ids.stride(1),
        EXPERTS=experts,
        CHOICES=expert_ids.shape[1],
        K=columns,
        SPREAD=spread,
        H_COLUMNS=intermediate,
        H_STRIDE=h.shape[1],
        TOKENS=tile_tokens,
        PAIR_BLOCK=4096,
        BLOCK=1024,
        num_warps=8,
    )
    return Prepared(grouping, stored, norms, totals, h)
