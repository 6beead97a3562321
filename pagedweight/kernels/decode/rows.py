"""The product that both launches are made of: rows of a linear-block at its committed width, times a few tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import operands, ptx, spread, tables
from pagedweight.kernels.decode.room import pipeline_stages, takes_room

BLOCK_COLUMNS = operands.BLOCK_COLUMNS
has_room = triton.constexpr_function(takes_room)
depth = triton.constexpr_function(pipeline_stages)


@triton.jit
def own_chunk(sums, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr):
    """(ROWS * CHUNKS, CHUNKS * TOKENS) -> (ROWS, TOKENS): the products of a row's chunk with the same chunk of x."""
    if CHUNKS == 1:
        return sums
    else:
        row_chunk = tl.arange(0, ROWS * CHUNKS) % CHUNKS
        column_chunk = tl.arange(0, CHUNKS * TOKENS) // TOKENS
        sums = tl.where(row_chunk[:, None] == column_chunk[None, :], sums, 0.0)
        return tl.sum(tl.sum(tl.reshape(sums, (ROWS, CHUNKS, CHUNKS, TOKENS)), 1), 1)


@triton.jit
def operand_rows(COUNT: tl.constexpr, WARPS: tl.constexpr, SINGLE: tl.constexpr):
    """Operand row of each loaded row. In a single step loads go straight to registers: a thread then holds rows 8 and
    8 * WARPS apart where the operand has 1 and 8, so they are loaded in the order that makes both agree."""
    loaded = tl.arange(0, COUNT)
    if SINGLE:
        tl.static_assert(COUNT == 16 * WARPS)
        return (loaded // 8 % WARPS) * 16 + (loaded // (8 * WARPS)) * 8 + loaded % 8
    else:
        return loaded


@triton.jit
def in_operand_order(weights, WARPS: tl.constexpr):
    ROWS: tl.constexpr = 16 * WARPS
    return tl.reshape(tl.permute(tl.reshape(weights, (2, WARPS, 8, 512)), (1, 0, 2, 3)), (ROWS, 512))


@triton.jit
def _weights(
    frames, local, block, table, table_operands, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr,
    COLUMNS: tl.constexpr, FRAME_ROWS: tl.constexpr, MASKED: tl.constexpr, BF16: tl.constexpr, PTX: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """(operand rows, 512) of one column block per row, as the product takes them."""
    first, width = operands.block_words(block, local, COLUMNS, FRAME_ROWS)
    if PTX:
        words = operands.load_words(frames, first, width, block, BITS, MASKED, COLUMNS)
        decoded = ptx.decode_words(words, table_operands, BITS, CODEBOOK, BF16, SPREAD)
        return operands.side_by_side(decoded, row.shape[0])
    else:
        codes = operands.portable_codes(frames, first, width, block, BITS, COLUMNS)
        return tables.portable_values(codes, table, row, BITS, CODEBOOK)


@triton.jit
def _add_product(weights, x, sums, PTX: tl.constexpr):
    if PTX:
        return tl.dot(weights, x, sums)
    else:
        return tl.dot(weights, x.to(tl.float32), sums, input_precision="ieee")


@triton.jit
def _load_x(x_ptr, x_start, x_used, block, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """(512, N) of the column blocks (N,)."""
    column, is_column = operands.block_columns(block, COLUMNS)
    if MASKED:
        return tl.load(x_ptr + (x_start[None, :] + column), is_column & x_used[None, :], other=0.0)
    else:
        return tl.load(x_ptr + (x_start[None, :] + column), x_used[None, :], other=0.0)


@triton.jit
def rows_product(
    x_ptr, x_start, x_used, frames, table, row, operand_row, chunk, first_step, last_step,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, COLUMNS: tl.constexpr, FRAME_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, SINGLE: tl.constexpr, WARPS: tl.constexpr,
    WAIT: tl.constexpr, PTX: tl.constexpr, room,
):  # fmt: skip
    """y[r, t] = sum_k value(row r, k) x[t, k] over column blocks [first_step * CHUNKS, last_step * CHUNKS).

    x_start, x_used: (CHUNKS * TOKENS,) first element of the token of operand column n = chunk * TOKENS + token, and
    whether there is one; row: (ROWS,) rows of the linear-block; operand_row, chunk: (ROWS * CHUNKS,) row and column
    chunk of each of `operand_rows`; frames: of operand_row; table: its address. A matrix row is CHUNKS operand rows,
    each with every CHUNKS-th column block, so
    that few rows still fill an operand. SINGLE: there is one step. WAIT: x is the previous launch's, still running;
    all that does not depend on it goes first. room: shared memory for tables, or None. Returns fp32 (ROWS, TOKENS).
    """
    ROWS: tl.constexpr = row.shape[0]
    OPERAND_ROWS: tl.constexpr = ROWS * CHUNKS
    MASKED: tl.constexpr = (COLUMNS % 512 != 0) or (operands.column_blocks(COLUMNS) % CHUNKS != 0)
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    column_chunk = tl.arange(0, CHUNKS * TOKENS) // TOKENS
    local = operand_row % FRAME_ROWS
    table_operands = ()
    SPREAD: tl.constexpr = room is not None and has_room(CODEBOOK, BITS)
    if SPREAD:
        table_operands = spread.copied(table, operand_row, room, BITS, BF16)
    elif PTX and CODEBOOK != "affine":
        table_operands = tables.table_operands(table, operand_row, BITS, CODEBOOK, BF16)
    sums = tl.zeros((OPERAND_ROWS, CHUNKS * TOKENS), tl.float32)
    NUMBERS: tl.constexpr = CODEBOOK == "lut8" or CODEBOOK == "affine"
    # Where operands are values but for a factor, the sum of x is not needed.
    SHIFTED: tl.constexpr = NUMBERS and (BITS >= 4 or not PTX)
    x_total = tl.zeros((BLOCK_COLUMNS, CHUNKS * TOKENS), tl.float32)
    if CODEBOOK == "affine":
        # Asked for before the loop: after it, every program would wait once more. Other lines lie beside table words.
        factor, shift = tables.byte_line(table, row, BITS, CODEBOOK)
    if SINGLE:
        weights = _weights(
            frames, local, first_step * CHUNKS + chunk, table, table_operands, operand_row,
            BITS, CODEBOOK, COLUMNS, FRAME_ROWS, MASKED, BF16, PTX, SPREAD,
        )  # fmt: skip
        weights = in_operand_order(weights, WARPS)
        if WAIT:
            tl.extra.cuda.gdc_wait()
        x = _load_x(x_ptr, x_start, x_used, first_step * CHUNKS + column_chunk, COLUMNS, MASKED)
        if SHIFTED:
            x_total += x.to(tl.float32)
        sums = _add_product(weights, x, sums, PTX)
    else:
        if WAIT:
            tl.extra.cuda.gdc_wait()
        for step in tl.range(first_step, last_step, num_stages=depth(STAGES, BITS, SPREAD, OPERAND_ROWS)):
            x = _load_x(x_ptr, x_start, x_used, step * CHUNKS + column_chunk, COLUMNS, MASKED)
            if SHIFTED:
                x_total += x.to(tl.float32)
            weights = _weights(
                frames, local, step * CHUNKS + chunk, table, table_operands, operand_row,
                BITS, CODEBOOK, COLUMNS, FRAME_ROWS, MASKED, BF16, PTX, SPREAD,
            )  # fmt: skip
            sums = _add_product(weights, x, sums, PTX)
    product = own_chunk(sums, ROWS, CHUNKS, TOKENS)
    if NUMBERS:
        if CODEBOOK != "affine":
            factor, shift = tables.byte_line(table, row, BITS, CODEBOOK)
        product = factor[:, None] * product
        if SHIFTED:
            if PTX:
                shift -= factor * ptx.number_bias(BITS, CODEBOOK, BF16)
            x_sum = tl.sum(tl.reshape(tl.sum(x_total, 0), (CHUNKS, TOKENS)), 0)
            product += shift[:, None] * x_sum[None, :]
    return product
