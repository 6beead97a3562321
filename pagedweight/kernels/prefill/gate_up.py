"""First product: gate and up rows of one tile of one expert's pairs, activated, into h."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedweight.kernels.gates import activation, gated_activation
from pagedweight.kernels.prefill import product, tile


@gluon.jit
def spread_position(column, COLUMNS: tl.constexpr):
    """Where a column stands in operand order: the tail block's words are set 8 or 16 apart."""
    FULL: tl.constexpr = COLUMNS // 512
    WIDTH: tl.constexpr = product.tail_words(COLUMNS)
    SPREAD: tl.constexpr = product.tail_width(COLUMNS)
    if WIDTH == SPREAD:
        return column
    else:
        within = column - 512 * FULL
        spread = 512 * FULL + (within // WIDTH) * SPREAD + within % WIDTH
        return gl.where(within < 0, column, spread)


@gluon.jit
def _both(a, b, other_a, other_b):
    return a + other_a, b + other_b


@gluon.jit
def _gate_up_tile(
    x_ptr, h_ptr, totals_ptr, squares_ptr, sums_ptr, pairs_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr, first_row,
    expert, start, last, row_tile,
    X_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    CHOICES: tl.constexpr, PLANES: tl.constexpr, PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, WIDTHS: tl.constexpr,
    CODEBOOKS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr, TOTALS: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = ROWS // 2 if GATED else ROWS
    ROW_TILES: tl.constexpr = (INTERMEDIATE + COLUMNS - 1) // COLUMNS
    slot = start + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, product.token_copy_layout(WARPS)))
    used = slot < last
    x_start = (gl.load(pairs_ptr + slot, mask=used, other=0) // CHOICES) * X_STRIDE
    sums, pair_smem = tile.tile_sums(
        x_ptr, x_start, used, totals_ptr, pairs_ptr, start, last, frame_ptr, table_ptr, bits_ptr, bias_ptr,
        first_row + 2 * expert, expert, row_tile, CHOICES, INTERMEDIATE, HIDDEN, False, GATED, BIAS, PLANES,
        PLANE_FRAMES, FRAME_ROWS, WIDTHS, CODEBOOKS, ROWS, TOKENS, WARPS,
    )  # fmt: skip
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(sums, (ROWS // 16, 2, 8, TOKENS)), (0, 2, 3, 1)))
        h = gl.reshape(gated_activation(gate, up, ACTIVATION, LIMIT), (COLUMNS, TOKENS))
    else:
        h = activation(sums, ACTIVATION)
    STORE: tl.constexpr = tile.store_layout(WARPS)
    h = gl.convert_layout(h.to(h_ptr.dtype.element_ty), STORE)
    column = row_tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, STORE))
    slot = start + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORE))
    pair = pair_smem.load(gl.SliceLayout(0, STORE))
    held = (slot < last)[None, :] & (column < INTERMEDIATE)[:, None]
    position = spread_position(column, INTERMEDIATE)
    gl.store(h_ptr + pair.to(gl.int64)[None, :] * H_STRIDE + position[:, None], h, mask=held)
    wide = h.to(gl.float32)
    if TOTALS:
        square, total = gl.reduce((gl.where(held, wide * wide, 0.0), gl.where(held, wide, 0.0)), 0, _both)
        gl.store(sums_ptr + pair * ROW_TILES + row_tile, total, mask=slot < last)
    else:
        square = gl.sum(gl.where(held, wide * wide, 0.0), 0)
    gl.store(squares_ptr + pair * ROW_TILES + row_tile, square, mask=slot < last)


@gluon.jit(do_not_specialize=["first_row"])
def _gate_up_kernel(
    x_ptr, h_ptr, totals_ptr, squares_ptr, sums_ptr, pairs_ptr, last_ptr, tile_expert_ptr, tile_first_ptr, bits_ptr,
    frame_ptr, table_ptr, bias_ptr, first_row,
    X_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    CHOICES: tl.constexpr, PLANES: tl.constexpr, PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, WIDTHS: tl.constexpr,
    CODEBOOKS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FEW: tl.constexpr, WARPS: tl.constexpr,
    TOTALS: tl.constexpr,
):  # fmt: skip
    """One program: C columns of h of up to TOKENS pairs of an expert, C = ROWS / 2, or ROWS without a gate.

    Grid (tiles * ceil(I / C),). h[p, i] = act(sum_k gate[i, k] x[t, k] + b[i], sum_k up[i, k] x[t, k] + b[I + i]), and
    the sums of h and h^2 over the program's columns. A tile of at most FEW pairs takes a product of that width. Frames
    of planes above the committed width may hold garbage.
    """
    COLUMNS: tl.constexpr = ROWS // 2 if GATED else ROWS
    ROW_TILES: tl.constexpr = (INTERMEDIATE + COLUMNS - 1) // COLUMNS
    row_tile = gl.program_id(0) % ROW_TILES
    group = gl.program_id(0) // ROW_TILES
    expert = gl.load(tile_expert_ptr + group)
    if expert >= 0:
        start = gl.load(tile_first_ptr + group)
        last = gl.load(last_ptr + expert)
        if FEW == TOKENS or last - start <= FEW:
            _gate_up_tile(
                x_ptr, h_ptr, totals_ptr, squares_ptr, sums_ptr, pairs_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr,
                first_row, expert, start, last, row_tile, X_STRIDE, H_STRIDE, HIDDEN, INTERMEDIATE, CHOICES, PLANES,
                PLANE_FRAMES, FRAME_ROWS, ACTIVATION, GATED, LIMIT, BIAS, WIDTHS, CODEBOOKS, ROWS, FEW, WARPS, TOTALS,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x_ptr, h_ptr, totals_ptr, squares_ptr, sums_ptr, pairs_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr,
                first_row, expert, start, last, row_tile, X_STRIDE, H_STRIDE, HIDDEN, INTERMEDIATE, CHOICES, PLANES,
                PLANE_FRAMES, FRAME_ROWS, ACTIVATION, GATED, LIMIT, BIAS, WIDTHS, CODEBOOKS, ROWS, TOKENS, WARPS,
                TOTALS,
            )  # fmt: skip
