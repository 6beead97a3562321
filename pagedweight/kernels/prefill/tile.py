"""What the two product launches share: the pairs of a tile, the committed width's product, and how tiles are stored."""

# ruff: noqa: RUF005 - kernels join tuples with +; they cannot unpack them.
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedweight.kernels.prefill import product, ptx


@triton.constexpr_function
def item(values, index):
    """values[index] as a constexpr; plain indexing loses that for strings."""
    return values[index]


@triton.constexpr_function
def store_layout(warps):
    """Tiles are stored by tokens, eight neighbouring rows a thread."""
    return gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1])


@gluon.jit
def gate_up_row(tile, m, INTERMEDIATE: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Row of gate_up for operand row m. A thread holds operand rows 8 apart, so gate and up of one column."""
    if GATED:
        within = gl.minimum(tile * (ROWS // 2) + (m // 16) * 8 + m % 8, INTERMEDIATE - 1)
        return ((m // 8) % 2) * INTERMEDIATE + within
    else:
        return gl.minimum(tile * ROWS + m, INTERMEDIATE - 1)


@gluon.jit
def down_row(tile, m, HIDDEN: tl.constexpr, ROWS: tl.constexpr):
    return gl.minimum(tile * ROWS + m, HIDDEN - 1)


@gluon.jit
def _row(tile, m, HEIGHT: tl.constexpr, ROWS: tl.constexpr, DOWN: tl.constexpr, GATED: tl.constexpr):
    if DOWN:
        return down_row(tile, m, HEIGHT, ROWS)
    else:
        return gate_up_row(tile, m, HEIGHT, ROWS, GATED)


@gluon.jit
def _copy_line(scale_smem, offset_smem, table, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    """Start copying what `_line` takes of each row's table."""
    pointer = table.to(gl.pointer_type(gl.float32), bitcast=False)
    if CODEBOOK == "lut8":
        ENTRY_WORDS: tl.constexpr = 2**BITS // 4
        product._copy(scale_smem, pointer + (row * (ENTRY_WORDS + 1) + ENTRY_WORDS), row >= 0)
    else:
        product._copy(scale_smem, pointer + 2 * row, row >= 0)
        product._copy(offset_smem, pointer + (2 * row + 1), row >= 0)


@gluon.jit
def _lined(sums, scale_smem, offset_smem, total_smem, BITS: tl.constexpr, CODEBOOK: tl.constexpr, BF16: tl.constexpr):
    """A row's line on its sums: values are scale * number + shift, with `tables.byte_line`'s scale and zero."""
    SUMS: tl.constexpr = sums.type.layout
    BIAS: tl.constexpr = ptx.number_bias(BITS, CODEBOOK, BF16)
    scale = scale_smem.load(gl.SliceLayout(1, SUMS))
    if CODEBOOK == "lut8":
        shift = (-64.0 - BIAS) * scale
    else:
        MIDDLE: tl.constexpr = 0.5 if BITS == 8 else 0.5 - 2 ** (BITS - 1)
        shift = offset_smem.load(gl.SliceLayout(1, SUMS)) + (MIDDLE - BIAS) * scale
    return sums * scale[:, None] + shift[:, None] * total_smem.load(gl.SliceLayout(0, SUMS))[None, :]


@gluon.jit
def tile_sums(
    x_ptr, x_start, used, totals_ptr, pairs_ptr, start, last, frame_ptr, table_ptr, bits_ptr, bias_ptr, block_row,
    expert, tile, CHOICES: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, PLANES: tl.constexpr, PLANE_FRAMES: tl.constexpr,
    FRAME_ROWS: tl.constexpr, WIDTHS: tl.constexpr, CODEBOOKS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """(fp32 (ROWS, TOKENS): the operand rows of a tile at the committed width, times the tokens, plus the bias; the
    tile's pairs, in shared memory).

    totals_ptr: the sum of every input row, which is pair // CHOICES. What follows the product is copied to shared
    memory beside the first words: one program has a multiprocessor to itself, and every load after the product would
    keep it waiting.
    """
    width = gl.load(bits_ptr + block_row)
    table = gl.load(table_ptr + block_row)
    address_ptr = frame_ptr + block_row.to(gl.int64) * (PLANES * PLANE_FRAMES)
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, product.word_copy_layout(WARPS)))
    copy_row = _row(tile, m, HEIGHT, ROWS, DOWN, GATED)
    m = gl.arange(0, ROWS, layout=product.row_layout(ROWS, TOKENS))
    operand_row = _row(tile, m, HEIGHT, ROWS, DOWN, GATED)
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, product.narrow_layout(ROWS)))
    narrow_row = _row(tile, m, HEIGHT, ROWS, DOWN, GATED)
    SUMS: tl.constexpr = product.product_layout(ROWS, TOKENS)
    row = _row(tile, gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS)), HEIGHT, ROWS, DOWN, GATED)
    words_smem = ()
    for _ in tl.static_range(item(WIDTHS, -1)):
        words_smem = words_smem + (
            gl.allocate_shared_memory(gl.int32, [ROWS, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0])),
        )
    x_smem = ()
    for _ in tl.static_range(product.STAGES):
        x_smem = x_smem + (
            gl.allocate_shared_memory(
                x_ptr.dtype.element_ty, [TOKENS, product.STEP_COLUMNS], gl.NVMMASharedLayout(128, 16, 2)
            ),
        )
    FLAT: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SHARED: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pair_smem = gl.allocate_shared_memory(gl.int32, [TOKENS], SHARED)
    total_smem = gl.allocate_shared_memory(gl.float32, [TOKENS], SHARED)
    scale_smem = gl.allocate_shared_memory(gl.float32, [ROWS], SHARED)
    offset_smem = gl.allocate_shared_memory(gl.float32, [ROWS], SHARED)
    slot = start + gl.arange(0, TOKENS, layout=FLAT)
    product._copy(pair_smem, pairs_ptr + slot, slot < last)
    line_row = _row(tile, gl.arange(0, ROWS, layout=FLAT), HEIGHT, ROWS, DOWN, GATED)
    sums = gl.zeros((ROWS, TOKENS), gl.float32, SUMS)
    for i in tl.static_range(len(WIDTHS)):
        if width == WIDTHS[i]:
            CODEBOOK: tl.constexpr = item(CODEBOOKS, i)
            if ptx.has_line(CODEBOOK):
                pair = gl.load(pairs_ptr + slot, mask=slot < last, other=0)
                product._copy(total_smem, totals_ptr + pair // CHOICES, slot < last)
                _copy_line(scale_smem, offset_smem, table, line_row, WIDTHS[i], CODEBOOK)
            sums = product.tile_product(
                x_ptr, x_start, used, address_ptr, table, copy_row, operand_row, narrow_row, words_smem,
                x_smem,
                WIDTHS[i], CODEBOOK, COLUMNS, PLANE_FRAMES, FRAME_ROWS, ROWS, TOKENS, WARPS,
            )  # fmt: skip
            if ptx.has_line(CODEBOOK):
                BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
                sums = _lined(sums, scale_smem, offset_smem, total_smem, WIDTHS[i], CODEBOOK, BF16)
    if BIAS:
        ALL_ROWS: tl.constexpr = HEIGHT if DOWN or not GATED else 2 * HEIGHT
        sums = sums + gl.load(bias_ptr + expert * ALL_ROWS + row).to(gl.float32)[:, None]
    return sums, pair_smem
