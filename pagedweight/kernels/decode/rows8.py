"""The same product through int8 tensor cores: weights as bytes, activations as two int8 digits.

Half the operand bytes and no conversion to floats: about 0.8 to 1.3 integer instructions a weight against 1.3 to 2.1.
Serves lut8 and affine, whose values are factor * byte + shift for each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import digits, operands, ptx, rows, tables


@triton.jit
def _side_by_side(tensors, ROWS: tl.constexpr):
    """32 tensors (ROWS, 16) of `ptx.int8_values` -> (ROWS, 512) in the int8 operand order of `digits`."""
    joined = operands.joined(tensors)
    split = tl.reshape(joined, (ROWS, 4, 4, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(split, (0, 3, 4, 5, 6, 1, 7, 2)), (ROWS, 512))


@triton.jit
def _accumulate(words, x, table, sums, BITS: tl.constexpr, CODEBOOK: tl.constexpr, ROWS: tl.constexpr):
    codes = ptx.int8_words(words, BITS, CODEBOOK)
    if CODEBOOK == "affine":
        return tl.dot(_side_by_side(ptx.int8_values(codes, (), False), ROWS), x, sums, out_dtype=tl.int32)
    else:
        low = _side_by_side(ptx.int8_values(operands.part(codes, 0, 8), operands.part(table, 0, 2), True), ROWS)
        sums = tl.dot(low, x, sums, out_dtype=tl.int32)
        if BITS == 4:
            # A look-up in the wrong half of the table is 0, so the product adds the halves.
            high = _side_by_side(ptx.int8_values(operands.part(codes, 8, 8), operands.part(table, 2, 2), True), ROWS)
            sums = tl.dot(high, x, sums, out_dtype=tl.int32)
        return sums


@triton.jit
def _portable_bytes(
    frames, first, width, block, table, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr, COLUMNS: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """(R, 512) int32 in operand order, one load, shift and mask per plane and weight."""
    word, bit = digits.operand_bit(tl.arange(0, 512)[None, :], ORDER)
    held = (word < width[:, None]) & (block < operands.column_blocks(COLUMNS))[:, None]
    codes = tl.zeros((1, 1), tl.int32)
    for plane in tl.static_range(BITS):
        codes = 2 * codes + ((tl.load(frames[plane][:, None] + first[:, None] + word, held, other=0) >> bit) & 1)
    if CODEBOOK == "lut8":
        pointer = table.to(tl.pointer_type(tl.uint8)) + row[:, None] * (2**BITS + 4)
        return tl.load(pointer + codes).to(tl.int32)
    else:
        return codes - (128 if BITS == 8 else 0)


@triton.jit
def rows_product(
    digits_ptr, scales_ptr, x_row, token_row, pairs, frames, table, row, operand_row, first_step, last_step,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, ORDERS: tl.constexpr, COLUMNS: tl.constexpr,
    FRAME_ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """y[r, t] as `rows.rows_product` gives it, fp32 (ROWS, TOKENS).

    x_row: (CHUNKS * TOKENS * 2,) row in digits of operand column n = (chunk * TOKENS + token) * 2 + digit; token_row:
    (TOKENS,) the same by token. The row's shift is added by the program that has the first columns.
    """
    ROWS: tl.constexpr = row.shape[0]
    OPERAND_ROWS: tl.constexpr = ROWS * CHUNKS
    N: tl.constexpr = CHUNKS * TOKENS * 2
    BLOCKS: tl.constexpr = operands.column_blocks(COLUMNS)
    MASKED: tl.constexpr = (COLUMNS % 512 != 0) or (BLOCKS % CHUNKS != 0)
    ORDER: tl.constexpr = 1 if CODEBOOK == "affine" else 0
    chunk = tl.arange(0, OPERAND_ROWS) % CHUNKS
    n = tl.arange(0, N)
    order = operands.index_of(ORDERS, ORDER)
    start = ((x_row * len(ORDERS) + order) * 2 + n % 2) * (512 * BLOCKS)
    used = (n // 2) % TOKENS < pairs
    local = operand_row % FRAME_ROWS
    words_of_table = ()
    if CODEBOOK == "lut8" and PTX:
        words_of_table = tables.lut8_words(table, operand_row, BITS)
    sums = tl.zeros((OPERAND_ROWS, N), tl.int32)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        block = step * CHUNKS + chunk
        first, width = operands.block_words(block, local, COLUMNS, FRAME_ROWS)
        x_block = step * CHUNKS + n // (2 * TOKENS)
        pointer = digits_ptr + (start + x_block * 512)[None, :] + tl.arange(0, 512)[:, None]
        x = tl.load(pointer, (used & (x_block < BLOCKS))[None, :], other=0)
        if PTX:
            words = operands.load_words(frames, first, width, block, BITS, MASKED, COLUMNS)
            sums = _accumulate(words, x, words_of_table, sums, BITS, CODEBOOK, OPERAND_ROWS)
        else:
            weights = _portable_bytes(
                frames, first, width, block, table, operand_row, BITS, CODEBOOK, COLUMNS, ORDER
            )
            # A block's sum of products of bytes is exact in fp32.
            sums += tl.dot(weights.to(tl.float32), x.to(tl.float32), input_precision="ieee").to(tl.int32)
    own = rows.own_chunk(sums.to(tl.float32), ROWS, CHUNKS, 2 * TOKENS)
    weighted = own * tl.where(tl.arange(0, 2 * TOKENS) % 2 == 0, 256.0, 1.0)[None, :]
    total = tl.sum(tl.reshape(weighted, (ROWS, TOKENS, 2)), 2)
    used_token = tl.arange(0, TOKENS) < pairs
    scale = tl.load(scales_ptr + 2 * token_row, used_token, other=0.0)
    x_sum = tl.where(first_step == 0, tl.load(scales_ptr + 2 * token_row + 1, used_token, other=0.0), 0.0)
    factor, shift = tables.byte_line(table, row, BITS, CODEBOOK)
    return (factor[:, None] * total + shift[:, None] * x_sum[None, :]) * scale[None, :]
