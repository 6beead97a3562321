"""The same product through int8 tensor cores: weights as bytes, activations as two int8 digits.

Half the operand bytes and no conversion to floats: about 0.8 to 1.3 integer instructions a weight against 1.3 to 2.1.
Serves lut8 and affine, whose values are factor * byte + shift for each row, and lut16 of up to 4 bits, whose entries
become two bytes of seven bits: 14 bits of the row's largest, and a product for each.
"""

# ruff: noqa: RUF005 - kernels join tuples with +; they cannot unpack them.
from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import digits, operands, ptx, rows, tables
from pagedweight.kernels.decode.config import takes_int8

takes_bytes = triton.constexpr_function(takes_int8)


@triton.constexpr_function
def digit_order(codebook):
    """The `digits` order of a codebook's operands."""
    return 1 if codebook == "affine" else 0


@triton.jit
def _side_by_side(tensors, ROWS: tl.constexpr):
    """32 tensors (ROWS, 16) of `ptx.int8_values` -> (ROWS, 512) in the int8 operand order of `digits`."""
    joined = operands.joined(tensors)
    split = tl.reshape(joined, (ROWS, 4, 4, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(split, (0, 3, 4, 5, 6, 1, 7, 2)), (ROWS, 512))


@triton.jit
def _operands(
    frames, local, block, table, table_words, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr, COLUMNS: tl.constexpr,
    FRAME_ROWS: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(operand rows, 512) int8 of a column block, one for each byte of a weight, the low one first."""
    ROWS: tl.constexpr = row.shape[0]
    first, width = operands.block_words(block, local, COLUMNS, FRAME_ROWS)
    if PTX:
        words = operands.load_words(frames, first, width, block, BITS, MASKED, COLUMNS)
        codes = ptx.int8_words(words, BITS, CODEBOOK)
        made = ()
        for i in tl.static_range(len(table_words)):
            made = made + (_side_by_side(ptx.int8_values(codes, table_words[i], BITS, CODEBOOK), ROWS),)
        return made
    else:
        return _portable_bytes(frames, first, width, block, table, row, BITS, CODEBOOK, COLUMNS)


@triton.jit
def _table_words(table, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr, PTX: tl.constexpr):
    """The table words (R, 1) of each byte of a weight."""
    if CODEBOOK == "lut16" and PTX:
        return tables.lut16_words(table, row, BITS)
    elif CODEBOOK == "lut8" and PTX:
        return (tables.lut8_words(table, row, BITS),)
    else:
        return ((),)


@triton.jit
def _add_product(weights, x, sums, PTX: tl.constexpr):
    if PTX:
        return tl.dot(weights, x, sums, out_dtype=tl.int32)
    else:
        # A block's sum of products of bytes is exact in fp32.
        return sums + tl.dot(weights.to(tl.float32), x.to(tl.float32), input_precision="ieee").to(tl.int32)


@triton.jit
def _portable_bytes(
    frames, first, width, block, table, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr, COLUMNS: tl.constexpr
):
    """What `_operands` gives, as int32: one load, shift and mask per plane and weight."""
    word, bit = digits.operand_bit(tl.arange(0, 512)[None, :], digit_order(CODEBOOK))
    held = (word < width[:, None]) & (block < operands.column_blocks(COLUMNS))[:, None]
    codes = tl.zeros((1, 1), tl.int32)
    for plane in tl.static_range(BITS):
        codes = 2 * codes + ((tl.load(frames[plane][:, None] + first[:, None] + word, held, other=0) >> bit) & 1)
    if CODEBOOK == "lut16":
        return tables.portable_lut16(codes, table, row, BITS)
    elif CODEBOOK == "lut8":
        pointer = table.to(tl.pointer_type(tl.uint8)) + row[:, None] * (2**BITS + 4)
        return (tl.load(pointer + codes).to(tl.int32),)
    else:
        return (codes - (128 if BITS == 8 else 0),)


@triton.jit
def rows_product(
    digits_ptr, scales_ptr, x_row, token_row, pairs, frames, table, row, operand_row, first_step, last_step,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, ORDERS: tl.constexpr, COLUMNS: tl.constexpr,
    FRAME_ROWS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y[r, t] as `rows.rows_product` gives it, fp32 (ROWS, TOKENS), from digits made by an earlier launch.

    x_row: (TOKENS * 2,) row in digits of operand column n = token * 2 + digit; token_row: (TOKENS,) the same by token.
    The row's shift is added by the program that has the first columns.
    """
    ROWS: tl.constexpr = row.shape[0]
    MASKED: tl.constexpr = COLUMNS % 512 != 0
    # Eight operand columns a product: with sixteen, four warps would get another instruction and reorder the weights.
    PRODUCTS: tl.constexpr = 2 if TOKENS == 8 else 1
    N: tl.constexpr = 2 * TOKENS // PRODUCTS
    local = operand_row % FRAME_ROWS
    n = tl.arange(0, 2 * TOKENS)
    order = operands.index_of(ORDERS, digit_order(CODEBOOK))
    start = ((x_row * len(ORDERS) + order) * 2 + n % 2) * (512 * operands.column_blocks(COLUMNS))
    used = n // 2 < pairs
    if PRODUCTS == 2:
        start, start_b = tl.split(tl.permute(tl.reshape(start, (2, N)), (1, 0)))
        used, used_b = tl.split(tl.permute(tl.reshape(used.to(tl.int32), (2, N)), (1, 0)))
        used, used_b = used > 0, used_b > 0
        start, start_b = tl.multiple_of(start, 512), tl.multiple_of(start_b, 512)
    table_words = _table_words(table, operand_row, BITS, CODEBOOK, PTX)
    TWO_BYTES: tl.constexpr = CODEBOOK == "lut16"
    sums = tl.zeros((ROWS, N), tl.int32)
    sums_b = tl.zeros((ROWS, N), tl.int32)
    tops = tl.zeros((ROWS, N), tl.int32)
    tops_b = tl.zeros((ROWS, N), tl.int32)
    if CODEBOOK == "affine":
        # Asked for before the loop: after it, every program would wait once more. Other lines lie beside table words.
        factor, shift = tables.byte_line(table, row, BITS, CODEBOOK)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    used_token = tl.arange(0, TOKENS) < pairs
    scale = tl.load(scales_ptr + 2 * token_row, used_token, other=0.0)
    x_sum = tl.where(first_step == 0, tl.load(scales_ptr + 2 * token_row + 1, used_token, other=0.0), 0.0)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        column = step * 512 + tl.arange(0, 512)[:, None]
        x = tl.load(digits_ptr + start[None, :] + column, used[None, :], other=0)
        if PRODUCTS == 2:
            x_b = tl.load(digits_ptr + start_b[None, :] + column, used_b[None, :], other=0)
        weights = _operands(
            frames, local, step + tl.zeros_like(local), table, table_words, operand_row,
            BITS, CODEBOOK, COLUMNS, FRAME_ROWS, MASKED, PTX,
        )  # fmt: skip
        sums = _add_product(weights[0], x, sums, PTX)
        if PRODUCTS == 2:
            sums_b = _add_product(weights[0], x_b, sums_b, PTX)
        if TWO_BYTES:
            tops = _add_product(weights[1], x, tops, PTX)
            if PRODUCTS == 2:
                tops_b = _add_product(weights[1], x_b, tops_b, PTX)
    total = _joined(sums, sums_b, ROWS, TOKENS, PRODUCTS)
    if TWO_BYTES:
        total += 128.0 * _joined(tops, tops_b, ROWS, TOKENS, PRODUCTS)
    if CODEBOOK != "affine":
        factor, shift = tables.byte_line(table, row, BITS, CODEBOOK)
    return (factor[:, None] * total + shift[:, None] * x_sum[None, :]) * scale[None, :]


@triton.jit
def _joined(sums, sums_b, ROWS: tl.constexpr, TOKENS: tl.constexpr, PRODUCTS: tl.constexpr):
    """int32 (ROWS, TOKENS * 2), in one part or two, to fp32 (ROWS, TOKENS): 256 high + low digit."""
    if PRODUCTS == 2:
        sums = tl.reshape(tl.permute(tl.join(sums, sums_b), (0, 2, 1)), (ROWS, 2 * TOKENS))
    weighted = sums.to(tl.float32) * tl.where(tl.arange(0, 2 * TOKENS) % 2 == 0, 256.0, 1.0)[None, :]
    return tl.sum(tl.reshape(weighted, (ROWS, TOKENS, 2)), 2)


@triton.jit
def _token_block(x_ptr, block, COLUMNS: tl.constexpr):
    """fp32 (512, CHUNKS): the token's columns of the blocks (CHUNKS,)."""
    column, is_column = operands.block_columns(block, COLUMNS)
    return tl.load(x_ptr + column, is_column, other=0.0).to(tl.float32)


@triton.jit
def token_product(
    x_ptr, frames, table, row, operand_row, chunk, first_step, last_step,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, COLUMNS: tl.constexpr, FRAME_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, SINGLE: tl.constexpr, WARPS: tl.constexpr, WAIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y[r] for one token at x_ptr, fp32 (ROWS, 1), its digits made here: a launch for one row would take longer.

    Arguments as `rows.rows_product`'s. The digits' scale is the peak of the columns that this program takes.
    """
    ROWS: tl.constexpr = row.shape[0]
    OPERAND_ROWS: tl.constexpr = ROWS * CHUNKS
    ORDER: tl.constexpr = digit_order(CODEBOOK)
    MASKED: tl.constexpr = (COLUMNS % 512 != 0) or (operands.column_blocks(COLUMNS) % CHUNKS != 0)
    local = operand_row % FRAME_ROWS
    column_chunk = tl.arange(0, CHUNKS)
    table_words = _table_words(table, operand_row, BITS, CODEBOOK, PTX)
    TWO_BYTES: tl.constexpr = CODEBOOK == "lut16"
    # A product per digit: side by side in one operand, shared memory would give them out byte by byte.
    sums_high = tl.zeros((OPERAND_ROWS, CHUNKS), tl.int32)
    sums_low = tl.zeros((OPERAND_ROWS, CHUNKS), tl.int32)
    tops_high = tl.zeros((OPERAND_ROWS, CHUNKS), tl.int32)
    tops_low = tl.zeros((OPERAND_ROWS, CHUNKS), tl.int32)
    if CODEBOOK == "affine":
        factor, shift = tables.byte_line(table, row, BITS, CODEBOOK)
    if SINGLE:
        weights = _operands(
            frames, local, first_step * CHUNKS + chunk, table, table_words, operand_row,
            BITS, CODEBOOK, COLUMNS, FRAME_ROWS, MASKED, PTX,
        )  # fmt: skip
        if WAIT:
            tl.extra.cuda.gdc_wait()
        x = _token_block(x_ptr, first_step * CHUNKS + column_chunk, COLUMNS)
        spoiled = tl.sum(x * 0.0)  # NaN where x has one or an infinity; digits cannot say it
        peak = tl.maximum(tl.max(tl.abs(x)), digits.SMALLEST)
        values = digits.rounded(x, peak)
        high, low = digits.operand_digits(values, CHUNKS, ORDER)
        ordered = rows.in_operand_order(weights[0], WARPS)
        sums_high = _add_product(ordered, high, sums_high, PTX)
        sums_low = _add_product(ordered, low, sums_low, PTX)
        if TWO_BYTES:
            ordered = rows.in_operand_order(weights[1], WARPS)
            tops_high = _add_product(ordered, high, tops_high, PTX)
            tops_low = _add_product(ordered, low, tops_low, PTX)
    else:
        if WAIT:
            tl.extra.cuda.gdc_wait()
        largest = tl.zeros((512, CHUNKS), tl.float32)
        zeros = tl.zeros((512, CHUNKS), tl.float32)
        for step in range(first_step, last_step):
            x = _token_block(x_ptr, step * CHUNKS + column_chunk, COLUMNS)
            largest = tl.maximum(largest, tl.abs(x))
            zeros += x * 0.0
        spoiled = tl.sum(zeros)
        peak = tl.maximum(tl.max(largest), digits.SMALLEST)
        values = tl.zeros((512, CHUNKS), tl.int32)
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            x = _token_block(x_ptr, step * CHUNKS + column_chunk, COLUMNS)
            step_values = digits.rounded(x, peak)
            values += step_values
            weights = _operands(
                frames, local, step * CHUNKS + chunk, table, table_words, operand_row,
                BITS, CODEBOOK, COLUMNS, FRAME_ROWS, MASKED, PTX,
            )  # fmt: skip
            high, low = digits.operand_digits(step_values, CHUNKS, ORDER)
            sums_high = _add_product(weights[0], high, sums_high, PTX)
            sums_low = _add_product(weights[0], low, sums_low, PTX)
            if TWO_BYTES:
                tops_high = _add_product(weights[1], high, tops_high, PTX)
                tops_low = _add_product(weights[1], low, tops_low, PTX)
    sums = 256.0 * sums_high.to(tl.float32) + sums_low.to(tl.float32)
    if TWO_BYTES:
        sums += 128.0 * (256.0 * tops_high.to(tl.float32) + tops_low.to(tl.float32))
    total = rows.own_chunk(sums, ROWS, CHUNKS, 1)
    if CODEBOOK != "affine":
        factor, shift = tables.byte_line(table, row, BITS, CODEBOOK)
    x_sum = tl.sum(values.to(tl.float32))
    return (factor[:, None] * total + shift[:, None] * x_sum) * (peak / digits.LARGEST + spoiled)
