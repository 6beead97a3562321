"""Second product: down rows of one tile of one expert's pairs."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedweight.kernels.prefill import product, tile


@gluon.jit
def _down_tile(
    h_ptr, y_ptr, totals_ptr, pairs_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr, first_row, expert, start, last,
    row_tile,
    H_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, PLANES: tl.constexpr,
    PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr, BIAS: tl.constexpr, WIDTHS: tl.constexpr,
    CODEBOOKS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    slot = start + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, product.token_copy_layout(WARPS)))
    used = slot < last
    h_start = gl.load(pairs_ptr + slot, mask=used, other=0) * H_STRIDE
    sums, pair_smem = tile.tile_sums(
        h_ptr, h_start, used, totals_ptr, pairs_ptr, start, last, frame_ptr, table_ptr, bits_ptr, bias_ptr,
        first_row + 2 * expert + 1, expert, row_tile, 1, HIDDEN, INTERMEDIATE, True, False, BIAS, PLANES, PLANE_FRAMES,
        FRAME_ROWS, WIDTHS, CODEBOOKS, ROWS, TOKENS, WARPS,
    )  # fmt: skip
    STORE: tl.constexpr = tile.store_layout(WARPS)
    y = gl.convert_layout(sums.to(y_ptr.dtype.element_ty), STORE)
    column = row_tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    slot = start + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORE))
    pair = pair_smem.load(gl.SliceLayout(0, STORE))
    held = (slot < last)[None, :] & (column < HIDDEN)[:, None]
    gl.store(y_ptr + pair.to(gl.int64)[None, :] * HIDDEN + column[:, None], y, mask=held)


@gluon.jit(do_not_specialize=["first_row"])
def _down_kernel(
    h_ptr, y_ptr, totals_ptr, pairs_ptr, last_ptr, tile_expert_ptr, tile_first_ptr, bits_ptr, frame_ptr, table_ptr,
    bias_ptr, first_row,
    H_STRIDE: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, PLANES: tl.constexpr,
    PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr, BIAS: tl.constexpr, WIDTHS: tl.constexpr,
    CODEBOOKS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FEW: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS outputs of up to TOKENS pairs of an expert. Grid (tiles * ceil(H / ROWS),).

    y[p, n] = sum_i down[n, i] h[p, i] + b[n], rounded once, not yet weighted. A tile of at most FEW pairs takes a
    product of that width. Frames of planes above the committed width may hold garbage.
    """
    ROW_TILES: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    row_tile = gl.program_id(0) % ROW_TILES
    group = gl.program_id(0) // ROW_TILES
    expert = gl.load(tile_expert_ptr + group)
    if expert >= 0:
        start = gl.load(tile_first_ptr + group)
        last = gl.load(last_ptr + expert)
        if FEW == TOKENS or last - start <= FEW:
            _down_tile(
                h_ptr, y_ptr, totals_ptr, pairs_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr, first_row, expert, start,
                last, row_tile, H_STRIDE, HIDDEN, INTERMEDIATE, PLANES, PLANE_FRAMES, FRAME_ROWS, BIAS, WIDTHS,
                CODEBOOKS, ROWS, FEW, WARPS,
            )  # fmt: skip
        else:
            _down_tile(
                h_ptr, y_ptr, totals_ptr, pairs_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr, first_row, expert, start,
                last, row_tile, H_STRIDE, HIDDEN, INTERMEDIATE, PLANES, PLANE_FRAMES, FRAME_ROWS, BIAS, WIDTHS,
                CODEBOOKS, ROWS, TOKENS, WARPS,
            )  # fmt: skip
