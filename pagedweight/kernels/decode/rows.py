"""The product that both launches are made of: rows of a linear-block at its committed width, times a few tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import operands, ptx, tables


@triton.jit
def _own_chunk(sums, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr):
    """(ROWS * CHUNKS, CHUNKS * TOKENS) -> (ROWS, TOKENS): the products of a row's chunk with the same chunk of x."""
    if CHUNKS == 1:
        return sums
    else:
        row_chunk = tl.arange(0, ROWS * CHUNKS) % CHUNKS
        column_chunk = tl.arange(0, CHUNKS * TOKENS) // TOKENS
        sums = tl.where(row_chunk[:, None] == column_chunk[None, :], sums, 0.0)
        return tl.sum(tl.sum(tl.reshape(sums, (ROWS, CHUNKS, CHUNKS, TOKENS)), 1), 1)


@triton.jit
def rows_product(
    x_ptr,
    x_start,
    x_used,
    address_ptr,
    table,
    row,
    operand_row,
    first_step,
    last_step,
    BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLANE_FRAMES: tl.constexpr,
    FRAME_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """y[r, t] = sum_k value(row r, k) x[t, k] over column blocks [first_step * CHUNKS, last_step * CHUNKS).

    x_start, x_used: (CHUNKS * TOKENS,) first element of the token of operand column n = chunk * TOKENS + token, and
    whether there is one; row: (ROWS,) rows of the linear-block; operand_row: each CHUNKS times; table: its address.
    A matrix row is CHUNKS operand rows, each with every CHUNKS-th column block, so that few rows still fill an
    operand. Returns fp32 (ROWS, TOKENS).
    """
    ROWS: tl.constexpr = row.shape[0]
    OPERAND_ROWS: tl.constexpr = ROWS * CHUNKS
    BLOCKS: tl.constexpr = operands.column_blocks(COLUMNS)
    MASKED: tl.constexpr = (COLUMNS % 512 != 0) or (BLOCKS % CHUNKS != 0)
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    chunk = tl.arange(0, OPERAND_ROWS) % CHUNKS
    column_chunk = tl.arange(0, CHUNKS * TOKENS) // TOKENS
    local = operand_row % FRAME_ROWS
    frames = operands.plane_rows(address_ptr, operand_row, BITS, PLANE_FRAMES, FRAME_ROWS)
    if PTX:
        table_operands = tables.table_operands(table, operand_row, BITS, CODEBOOK, BF16)
    sums = tl.zeros((OPERAND_ROWS, CHUNKS * TOKENS), tl.float32)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        block = step * CHUNKS + chunk
        first, width = operands.block_words(block, local, COLUMNS, FRAME_ROWS)
        column, is_column = operands.block_columns(step * CHUNKS + column_chunk, COLUMNS)
        if MASKED:
            x = tl.load(x_ptr + (x_start[None, :] + column), is_column & x_used[None, :], other=0.0)
        else:
            x = tl.load(x_ptr + (x_start[None, :] + column), x_used[None, :], other=0.0)
        if PTX:
            words = operands.load_words(frames, first, width, block, MASKED, COLUMNS)
            weights = operands.side_by_side(ptx.decode_words(words, table_operands, BITS, CODEBOOK, BF16), OPERAND_ROWS)
            sums = tl.dot(weights, x, sums)
        else:
            codes = operands.portable_codes(frames, first, width, block, COLUMNS)
            weights = tables.portable_values(codes, table, operand_row, BITS, CODEBOOK)
            sums = tl.dot(weights, x.to(tl.float32), sums, input_precision="ieee")
    product = _own_chunk(sums, ROWS, CHUNKS, TOKENS)
    if CODEBOOK == "lut8" or CODEBOOK == "affine":
        product = product * tables.row_factor(table, row, BITS, CODEBOOK)[:, None]
    return product
