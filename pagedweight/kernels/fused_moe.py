"""Routed experts over paged planes for batches of any size: permute, group, gate_up, down, weighted sum, statistics.

Grids and scratch depend on shapes alone; widths and addresses are read on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagedweight.kernels.codes import add_product, operand_type, position_of
from pagedweight.kernels.device_order import PlaneGeometry, plane_geometry, row_words
from pagedweight.kernels.gates import gate_activation
from pagedweight.kernels.launch import LaunchConfig, choose, shared_limit, split_codebooks
from pagedweight.kernels.permute import launch_permute
from pagedweight.kernels.routing import Grouping, launch_group, launch_routing
from pagedweight.kernels.weighted_sum import launch_weighted_sum
from pagedweight.layout import BlockTables, RoutingStats

# Bounds the scratch of long prompts: 2^16 pairs of 4096 fp32 outputs are 1 GiB.
PAIRS_PER_LAUNCH = 1 << 16


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
    OPERAND: tl.constexpr,
    BOOKS: tl.constexpr,
    BOOK_WIDTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program: BLOCK_M pairs of one expert x BLOCK_N / 2 intermediate columns. Grid (tiles, I / (BLOCK_N / 2)).

    h[p, i] = act(sum_k gate[i, k] x[t, k]) * sum_k up[i, k] x[t, k], written in the stored order of down's columns,
    and the sum of h^2 over the program's columns. Frames of planes above the committed width may hold garbage.
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

        HALF: tl.constexpr = BLOCK_N // 2
        lane = tl.arange(0, BLOCK_N)
        column = tl.program_id(1) * HALF + lane % HALF
        acc = add_product(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x_ptr + (pair // per_token) * stride_xt, mask_m,
            frame_ptr + row * planes * frames, table, width, (lane // HALF) * I + column, column < I, frames, H,
            BLOCK_N, WORDS, ROWS_PER_FRAME, OPERAND, BOOKS, BOOK_WIDTHS,
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        inner = gate_activation(gate, ACTIVATION) * up

        column = tl.program_id(1) * HALF + tl.arange(0, HALF)
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
    first_row,
    planes,
    frames,
    stride_ht,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS_PER_FRAME: tl.constexpr,
    OPERAND: tl.constexpr,
    BOOKS: tl.constexpr,
    BOOK_WIDTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program: BLOCK_M pairs of one expert x BLOCK_N outputs. Grid (tiles, H / BLOCK_N).

    y[p, n] = sum_i down[n, i] h[p, i] in fp32, not yet weighted. Frames above the committed width may hold garbage.
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
        tl.store(y_ptr + pair[:, None] * H + column[None, :], acc, mask=mask_m[:, None] & (column < H)[None, :])


@dataclass(frozen=True, slots=True)
class _Launch:
    """What the launches of one batch share."""

    tables: BlockTables
    grouping: Grouping
    config: LaunchConfig
    operand: tl.dtype
    first_row: int
    codebooks: Mapping[int, str]

    def arguments(self, geometry: PlaneGeometry) -> dict[str, object]:
        books = tuple(sorted(set(self.codebooks.values())))
        return {
            "pairs_ptr": self.grouping.pairs,
            "last_ptr": self.grouping.last,
            "tile_expert_ptr": self.grouping.tile_expert,
            "tile_first_ptr": self.grouping.tile_first,
            "bits_ptr": self.tables.bits,
            "frame_ptr": self.tables.frame_address,
            "table_ptr": self.tables.table_address,
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
    config: LaunchConfig | None = None,
) -> torch.Tensor:
    """`fused_moe` by the grouped kernels, for any number of tokens, on the current device.

    Deterministic; safe to capture in a CUDA graph. The op has checked the arguments.
    """
    tables, stats = BlockTables(bits, frame_address, table_address, memory), RoutingStats(mass, counts, features)
    books = dict(zip(widths, split_codebooks(codebooks, widths), strict=True))
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
            activation=activation,
            codebooks=books,
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
    activation: str,
    codebooks: Mapping[int, str],
) -> None:
    gate_up = plane_geometry(2 * intermediate, x.shape[1], frame_bytes)
    down = plane_geometry(x.shape[1], intermediate, frame_bytes)
    grouping = launch_group(expert_ids, experts, config.block_m)
    launch = _Launch(tables, grouping, config, operand_type(x.dtype), first_row, codebooks)
    stored, norms = launch_permute(x)
    inner, squares = _launch_gate_up(stored, launch, gate_up, intermediate, activation, expert_ids.numel())
    y = _launch_down(inner, launch, down, expert_ids.numel())
    launch_weighted_sum(y, expert_ids, expert_weights, out, experts)
    launch_routing(expert_weights, token_slot, grouping, norms, squares, stats, layer_index)


def _launch_gate_up(
    stored: torch.Tensor, launch: _Launch, geometry: PlaneGeometry, intermediate: int, activation: str, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs, stored I) activations in stored order, padding unwritten; and (pairs, column tiles) sums of squares."""
    column_tiles = triton.cdiv(intermediate, launch.config.block_n // 2)
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
        ACTIVATION=activation,
        **launch.arguments(geometry),
    )
    return inner, squares


def _launch_down(inner: torch.Tensor, launch: _Launch, geometry: PlaneGeometry, pairs: int) -> torch.Tensor:
    """(pairs, H) fp32 outputs, not yet weighted; rows of pairs without an expert are unwritten."""
    y = torch.empty(pairs, geometry.rows, dtype=torch.float32, device=inner.device)
    _down_kernel[(len(launch.grouping.tile_expert), triton.cdiv(geometry.rows, launch.config.block_n))](
        inner_ptr=inner,
        y_ptr=y,
        stride_ht=inner.stride(0),
        H=geometry.rows,
        I=geometry.columns,
        **launch.arguments(geometry),
    )
    return y
