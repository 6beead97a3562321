"""From frames to weights inside a kernel: planes through frame addresses, codes from planes, values from tables.

Plain Triton only, so it runs on every backend and in the interpreter. Columns are handled in stored order
(position = 32 * word + bit of the device order); inputs are permuted to it once, weights never.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def column_at(position, K: tl.constexpr):
    """The column kept at a stored position; K or more at padding."""
    FULL: tl.constexpr = K // 512
    TAIL: tl.constexpr = ((K % 512 + 63) // 64) * 2
    word = position // 32
    bit = position % 32
    block = word // 16
    word = word % 16
    block_words = tl.where(block < FULL, 16, TAIL)
    nibble = bit >> 2
    q = ((bit & 3) << 2) | (((nibble >> 2) & 1) << 1) | (nibble & 1)
    j = ((word & 1) << 4) | q
    w = (word & 14) | ((nibble >> 1) & 1)
    return 512 * block + block_words * j + w


@triton.jit
def position_of(column, K: tl.constexpr):
    """The stored position of a column; the inverse of column_at."""
    FULL: tl.constexpr = K // 512
    # max(..., 2): a whole number of blocks has no tail, and nothing may divide by zero.
    TAIL: tl.constexpr = max(((K % 512 + 63) // 64) * 2, 2)
    block = column // 512
    block_words = tl.where(block < FULL, 16, TAIL)
    inner = column % 512
    j = inner // block_words
    w = inner % block_words
    q = j & 15
    word = 16 * block + (w & ~1) + (j >> 4)
    bit = 4 * (4 * ((q >> 1) & 1) + (q & 1) + 2 * (w & 1)) + (q >> 2)
    return 32 * word + bit


@triton.jit
def word_offset(rows, word, K: tl.constexpr, ROWS_PER_FRAME: tl.constexpr):
    """(BLOCK_N, WORDS) where words `word` of rows `rows` lie in their frame, in words; the same for every plane."""
    FULL: tl.constexpr = K // 512
    TAIL: tl.constexpr = ((K % 512 + 63) // 64) * 2
    block = word // 16
    block_words = tl.where(block < FULL, 16, TAIL)
    return (block * (16 * ROWS_PER_FRAME) + word % 16)[None, :] + (rows % ROWS_PER_FRAME)[:, None] * block_words[
        None, :
    ]


@triton.jit
def load_weights(
    frames_ptr,
    table_ptr,
    width,
    rows,
    mask_rows,
    first_word,
    frames,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS_PER_FRAME: tl.constexpr,
):
    """(BLOCK_N, 32 * WORDS) fp16 weights in stored order: w[n, k] = table[n, code(n, k)], zero where masked.

    frames_ptr: the linear-block's addresses [P, frames]; only the first `width` planes are read.
    table_ptr: to its fp16 table [N, 2^width].
    """
    STORED_WORDS: tl.constexpr = (K + 63) // 64 * 2
    PADDED: tl.constexpr = K % 64 != 0
    word = first_word + tl.arange(0, WORDS)
    mask = mask_rows[:, None] & (word < STORED_WORDS)[None, :]
    mask_words = tl.broadcast_to(mask[:, :, None], (BLOCK_N, WORDS, 8))
    offset = tl.broadcast_to(word_offset(rows, word, K, ROWS_PER_FRAME)[:, :, None], (BLOCK_N, WORDS, 8))
    # Lanes must share a word, and below a row's table. Nothing makes the compiler order them so but a claim of
    # contiguity; as the alignment of frames and tables is unknown to it, it can't join loads on the strength of that.
    offset = tl.max_contiguous(offset, (1, 2, 4))
    # Four codes at a time: those of bits j, j + 8, j + 16, j + 24, each in a byte.
    shift = tl.arange(0, 8)[None, None, :]
    codes = tl.zeros((BLOCK_N, WORDS, 8), tl.int32)
    address_ptr = frames_ptr + rows // ROWS_PER_FRAME
    for plane in range(0, width):
        address = tl.load(address_ptr + plane * frames, mask=mask_rows, other=0)
        words_ptr = address.to(tl.pointer_type(tl.int32))[:, None, None] + offset
        words = tl.load(words_ptr, mask=mask_words, other=0)
        codes = (codes << 1) | ((words >> shift) & 0x01010101)
    byte = tl.arange(0, 4)
    code = (codes[:, :, None, :] >> (8 * byte)[None, None, :, None]) & 0xFF
    if PADDED:
        # Padding bits may be anything, and what they name in the table need not be finite.
        position = word[:, None, None] * 32 + byte[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        mask_entry = mask[:, :, None, None] & (column_at(position, K) < K)[None, :, :, :]
    else:
        mask_entry = tl.broadcast_to(mask[:, :, None, None], (BLOCK_N, WORDS, 4, 8))
    entry = tl.max_contiguous((rows << width)[:, None, None, None] + code, (2, 4, 1, 8))
    value = tl.load(table_ptr + entry, mask=mask_entry, other=0.0)
    return tl.reshape(value, (BLOCK_N, 32 * WORDS))


@triton.jit
def add_product(
    acc,
    x_ptr,
    mask_tokens,
    frames_ptr,
    table_ptr,
    width,
    rows,
    mask_rows,
    frames,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS_PER_FRAME: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """acc[m, n] + sum_k x[m, k] * w[n, k] over all K columns of a linear-block.

    x_ptr: (BLOCK_M,) pointers to permuted input rows of ceil(K / 64) * 64 entries; padding entries may be anything.
    """
    STORED: tl.constexpr = (K + 63) // 64 * 64
    BLOCK_K: tl.constexpr = 32 * WORDS
    for first in range(0, STORED, BLOCK_K):
        position = first + tl.arange(0, BLOCK_K)
        mask_k = position < STORED
        if STORED != K:
            mask_k = mask_k & (column_at(position, K) < K)
        x = tl.load(x_ptr[:, None] + position[None, :], mask=mask_tokens[:, None] & mask_k[None, :], other=0.0)
        weights = load_weights(
            frames_ptr, table_ptr, width, rows, mask_rows, first // 32, frames, K, BLOCK_N, WORDS, ROWS_PER_FRAME
        )
        acc = tl.dot(x.to(OPERAND), tl.trans(weights.to(OPERAND)), acc, input_precision="ieee")
    return acc


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """What add_product multiplies: the inputs' own type, or fp32 for bf16 in the interpreter."""
    if dtype is torch.bfloat16 and not isinstance(add_product, triton.JITFunction):
        # The interpreter would multiply the bit patterns.
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
