"""The two products of the routed experts by groups of pairs: kernels that read planes at their committed widths.

Grids and scratch depend on shapes alone; widths and addresses are read on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagedweight.kernels.codes import add_product, position_of
from pagedweight.kernels.device_order import PlaneGeometry, row_words
from pagedweight.kernels.gates import activation, gated_activation
from pagedweight.kernels.launch import LaunchConfig
from pagedweight.kernels.routing import Grouping
from pagedweight.layout import BlockTables


# first_row differs from layer to layer; specialising on it would compile a kernel per layer.
@triton.jit(do_not_specialize=["first_row"])
def _gate_up_kernel(
    x_ptr,
    inner_ptr,
    squares_ptr,
    pairs_ptr,
    last_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    bits_ptr,
    frame_ptr,
    table_ptr,
    bias_ptr,
    first_row,
    per_token,
    planes,
    frames,
    stride_xt,
    stride_ht,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS_PER_FRAME: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    BOOKS: tl.constexpr,
    BOOK_WIDTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program: BLOCK_M pairs of one expert x C intermediate columns, C = BLOCK_N / 2, or BLOCK_N without a gate.

    Grid (tiles, I / C). h[p, i] = act(sum_k gate[i, k] x[t, k] + b[i], sum_k up[i, k] x[t, k] + b[I + i]), written in
    the stored order of down's columns, and the sum of h^2 over the program's columns. Frames of planes above the
    committed width may hold garbage.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        slot = tl.load(tile_first_ptr + tile) + tl.arange(0, BLOCK_M)
        mask_m = slot < tl.load(last_ptr + expert)
        pair = tl.load(pairs_ptr + slot, mask=mask_m, other=0).to(tl.int64)
        row = (first_row + 2 * expert).to(tl.int64)
        width = tl.load(bits_ptr + row)
        table = tl.load(table_ptr + row).to(tl.pointer_type(tl.float16))

        COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
        lane = tl.arange(0, BLOCK_N)
        column = tl.program_id(1) * COLUMNS + lane % COLUMNS
        weight_row = (lane // COLUMNS) * I + column
        acc = add_product(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x_ptr + (pair // per_token) * stride_xt, mask_m,
            frame_ptr + row * planes * frames, table, width, weight_row, column < I, frames, H,
            BLOCK_N, WORDS, ROWS_PER_FRAME, OPERAND, BOOKS, BOOK_WIDTHS,
        )  # fmt: skip
        if BIAS:
            bias = tl.load(bias_ptr + expert * ((1 + GATED) * I) + weight_row, mask=column < I, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, COLUMNS)), (0, 2, 1)))
            inner = gated_activation(gate, up, ACTIVATION, LIMIT)
        else:
            inner = activation(acc, ACTIVATION)

        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = mask_m[:, None] & (column < I)[None, :]
        inner_at = inner_ptr + pair[:, None] * stride_ht + position_of(column, I)[None, :]
        tl.store(inner_at, inner.to(inner_ptr.dtype.element_ty), mask=mask)
        square = tl.sum(tl.where(mask, inner * inner, 0.0), 1)
        tl.store(squares_ptr + pair * tl.num_programs(1) + tl.program_id(1), square, mask=mask_m)


@triton.jit(do_not_specialize=["first_row"])
def _down_kernel(
    inner_ptr,
    y_ptr,
    pairs_ptr,
    last_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    bits_ptr,
    frame_ptr,
    table_ptr,
    bias_ptr,
    first_row,
    planes,
    frames,
    stride_ht,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS_PER_FRAME: tl.constexpr,
    BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    BOOKS: tl.constexpr,
    BOOK_WIDTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program: BLOCK_M pairs of one expert x BLOCK_N outputs. Grid (tiles, H / BLOCK_N).

    y[p, n] = sum_i down[n, i] h[p, i] + b[n] in fp32, not yet weighted. Frames of planes above the committed
    width may hold garbage.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        slot = tl.load(tile_first_ptr + tile) + tl.arange(0, BLOCK_M)
        mask_m = slot < tl.load(last_ptr + expert)
        pair = tl.load(pairs_ptr + slot, mask=mask_m, other=0).to(tl.int64)
        row = (first_row + 2 * expert + 1).to(tl.int64)
        width = tl.load(bits_ptr + row)
        table = tl.load(table_ptr + row).to(tl.pointer_type(tl.float16))
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = add_product(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), inner_ptr + pair * stride_ht, mask_m,
            frame_ptr + row * planes * frames, table, width, column, column < H, frames, I, BLOCK_N, WORDS,
            ROWS_PER_FRAME, OPERAND, BOOKS, BOOK_WIDTHS,
        )  # fmt: skip
        if BIAS:
            acc += tl.load(bias_ptr + expert * H + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + pair[:, None] * H + column[None, :], acc, mask=mask_m[:, None] & (column < H)[None, :])


class Gate(NamedTuple):
    """What stands between an expert's two products, as fused_moe takes it; biases or None."""

    activation: str
    gated: bool
    limit: float
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GroupedLaunch:
    """What the launches of one batch share."""

    tables: BlockTables
    grouping: Grouping
    config: LaunchConfig
    operand: tl.dtype
    first_row: int
    codebooks: Mapping[int, str]
    gate: Gate

    def arguments(self, geometry: PlaneGeometry, bias: torch.Tensor | None) -> dict[str, object]:
        books = tuple(sorted(set(self.codebooks.values())))
        return {
            "pairs_ptr": self.grouping.pairs,
            "last_ptr": self.grouping.last,
            "tile_expert_ptr": self.grouping.tile_expert,
            "tile_first_ptr": self.grouping.tile_first,
            "bits_ptr": self.tables.bits,
            "frame_ptr": self.tables.frame_address,
            "table_ptr": self.tables.table_address,
            # Without a bias any pointer will do: it is not read.
            "bias_ptr": self.tables.bits if bias is None else bias,
            "BIAS": bias is not None,
            "first_row": self.first_row,
            "planes": self.tables.frame_address.shape[1],
            "frames": self.tables.frame_address.shape[2],
            "ROWS_PER_FRAME": geometry.rows_per_frame,
            "OPERAND": self.operand,
            "BOOKS": books,
            "BOOK_WIDTHS": tuple(sum(1 << b for b, name in self.codebooks.items() if name == book) for book in books),
            "BLOCK_M": self.config.block_m,
            "BLOCK_N": self.config.block_n,
            "WORDS": self.config.words,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
        }


def launch_gate_up(
    stored: torch.Tensor, launch: GroupedLaunch, geometry: PlaneGeometry, intermediate: int, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs, stored I) activations in stored order, padding unwritten; and (pairs, column tiles) sums of squares."""
    gate = launch.gate
    column_tiles = triton.cdiv((1 + gate.gated) * intermediate, launch.config.block_n)
    inner = stored.new_empty(pairs, 32 * row_words(intermediate))
    squares = torch.empty(pairs, column_tiles, dtype=torch.float32, device=stored.device)
    _gate_up_kernel[(len(launch.grouping.tile_expert), column_tiles)](
        x_ptr=stored,
        inner_ptr=inner,
        squares_ptr=squares,
        per_token=pairs // stored.shape[0],
        stride_xt=stored.stride(0),
        stride_ht=inner.stride(0),
        H=geometry.columns,
        I=intermediate,
        ACTIVATION=gate.activation,
        GATED=gate.gated,
        LIMIT=gate.limit,
        **launch.arguments(geometry, gate.gate_up_bias),
    )
    return inner, squares


def launch_down(inner: torch.Tensor, launch: GroupedLaunch, geometry: PlaneGeometry, pairs: int) -> torch.Tensor:
    """(pairs, H) fp32 outputs, not yet weighted; rows of pairs without an expert are unwritten."""
    y = torch.empty(pairs, geometry.rows, dtype=torch.float32, device=inner.device)
    _down_kernel[(len(launch.grouping.tile_expert), triton.cdiv(geometry.rows, launch.config.block_n))](
        inner_ptr=inner,
        y_ptr=y,
        stride_ht=inner.stride(0),
        H=geometry.rows,
        I=geometry.columns,
        **launch.arguments(geometry, launch.gate.down_bias),
    )
    return y
