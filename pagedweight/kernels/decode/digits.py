"""Activations as two int8 digits, in the column order of int8 operands: 16 bits of precision, tensor cores of int8.

Row x becomes scale * (256 high + low). An int8 operand holds four columns of a register in the order in which the
decoder makes them, which differs between looked-up codes (ORDER 0) and codes that are numbers (ORDER 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import operands

SEGMENT = tl.constexpr(2048)
SMALLEST = tl.constexpr(1e-30)  # peak of a row of zeros
LARGEST = tl.constexpr(32512.0)  # 127 * 256: the high digit stays within int8 after rounding


@triton.jit
def operand_bit(within, ORDER: tl.constexpr):
    """(word, bit) of a row's block from which an int8 operand takes its column `within` of 512."""
    part = within & 3
    tensor = ((within >> 5) << 1) | ((within >> 2) & 1)
    word = 4 * ((within >> 3) & 3) + (tensor & 3)
    return word, 16 * ((tensor >> 2) & 1) + 4 * part + (tensor >> 3) if ORDER == 0 else 8 * part + (tensor >> 2)


@triton.jit
def ordered_column(position, COLUMNS: tl.constexpr, ORDER: tl.constexpr):
    """(column, is one) of the weight at a position of the operand order."""
    TAIL: tl.constexpr = operands.tail_words(COLUMNS)
    block = position // 512
    word, bit = operand_bit(position % 512, ORDER)
    nibble = bit >> 2
    j = 4 * (bit & 3) + 2 * (nibble >> 2) + (nibble & 1) + 16 * (word & 1)
    w = (word & 14) + ((nibble >> 1) & 1)
    width = tl.where(block >= COLUMNS // 512, TAIL, 16)
    column = 512 * block + j * width + w
    return column, (w < width) & (column < COLUMNS)


@triton.jit
def _store_digits(digits_ptr, position, value, ROW: tl.constexpr):
    """value: int32 in -32512..32512."""
    high = (value + 128) >> 8
    tl.store(digits_ptr + position, high.to(tl.int8), position < ROW)
    tl.store(digits_ptr + ROW + position, (value - 256 * high).to(tl.int8), position < ROW)


@triton.jit
def rounded(x, largest):
    """x in units of largest / 32512, int32."""
    return tl.floor(x * (LARGEST / largest) + 0.5).to(tl.int32)


@triton.jit
def _in_operand_order(digit, CHUNKS: tl.constexpr, ORDER: tl.constexpr):
    # Both orders move whole bits of the position: column = 16 j + w, with w in the low four.
    bits = tl.reshape(digit, (CHUNKS, 2, 2, 2, 2, 2, 2, 2, 2, 2))
    if ORDER == 0:
        bits = tl.permute(bits, (0, 2, 3, 4, 8, 6, 7, 1, 9, 5))
    else:
        bits = tl.permute(bits, (0, 5, 2, 3, 8, 6, 7, 1, 4, 9))
    # Transposed last: shared memory then holds a column's positions side by side, and they are read by words.
    return tl.trans(tl.reshape(bits, (CHUNKS, 512)))


@triton.jit
def operand_digits(values, CHUNKS: tl.constexpr, ORDER: tl.constexpr):
    """int32 (512, CHUNKS) in column order of full blocks -> high and low int8 (512, CHUNKS) in operand order."""
    values = tl.trans(values)
    high = (values + 128) >> 8
    low = values - 256 * high
    return _in_operand_order(high.to(tl.int8), CHUNKS, ORDER), _in_operand_order(low.to(tl.int8), CHUNKS, ORDER)


@triton.jit
def quantize_segment(
    x_ptr, digits_ptr, scales_ptr, row, segment, COLUMNS: tl.constexpr, ORDERS: tl.constexpr, ROW: tl.constexpr
):
    """One segment of a row: digits in every order of ORDERS; the first segment also writes (scale, sum of values).

    digits: (rows, len(ORDERS), 2, ROW) int8, ROW = 512 * column blocks; scales: (rows, 2) fp32.
    """
    x_ptr += row * COLUMNS
    largest = tl.zeros((SEGMENT,), tl.float32)
    spoiled = tl.zeros((SEGMENT,), tl.float32)
    for first in range(0, COLUMNS, SEGMENT):
        column = first + tl.arange(0, SEGMENT)
        x = tl.load(x_ptr + column, column < COLUMNS, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        spoiled += x * 0.0
    peak = tl.maximum(tl.max(largest, 0), SMALLEST)
    for i in tl.static_range(len(ORDERS)):
        position = segment * SEGMENT + tl.arange(0, SEGMENT)
        column, is_one = ordered_column(position, COLUMNS, ORDERS[i])
        x = tl.load(x_ptr + column, is_one & (position < ROW), other=0.0).to(tl.float32)
        _store_digits(digits_ptr + (row * len(ORDERS) + i) * (2 * ROW), position, rounded(x, peak), ROW)
    if segment == 0:
        total = tl.zeros((SEGMENT,), tl.int32)
        for first in range(0, COLUMNS, SEGMENT):
            column = first + tl.arange(0, SEGMENT)
            total += rounded(tl.load(x_ptr + column, column < COLUMNS, other=0.0).to(tl.float32), peak)
        # An int8 digit cannot be NaN, so a row with a NaN or an infinity has a NaN for its scale: it must be seen.
        tl.store(scales_ptr + 2 * row, peak / LARGEST + tl.sum(spoiled, 0))
        tl.store(scales_ptr + 2 * row + 1, tl.sum(total.to(tl.float32), 0))


@triton.jit
def _quantize_h_kernel(
    h_ptr, digits_ptr, scales_ptr, ids_ptr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ORDERS: tl.constexpr,
    ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one segment of one pair's h. Grid (pairs, segments). Pairs whose id is no expert are left out."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair)
    if (expert >= 0) & (expert < EXPERTS):
        quantize_segment(h_ptr, digits_ptr, scales_ptr, pair, tl.program_id(1), COLUMNS, ORDERS, ROW)
