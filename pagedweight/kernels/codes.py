"""From frames to weights inside a kernel: planes through frame addresses, codes from planes, values from tables.

Plain Triton only, so it runs on every backend and in the interpreter. Columns are handled in stored order
(position = 32 * word + bit of the device order); inputs are permuted to it once, weights never.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LUT8_ZERO = tl.constexpr(64)


@triton.constexpr_function
def book_at(books, index):
    """books[index] as a constexpr; plain indexing loses that for strings."""
    return books[index]


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
def load_values(table_ptr, width, rows, mask_rows, code, mask_entry, BOOK: tl.constexpr):
    """Values of codes (BLOCK_N, WORDS, 4, 8), as `pagedweight.bitplane.table_values` defines them.

    fp16 for lut16, else fp32; zero where a lut's entry or a formula's row is masked. table_ptr: to fp16.
    """
    if BOOK == "lut16":
        entry = tl.max_contiguous((rows << width)[:, None, None, None] + code, (2, 4, 1, 8))
        return tl.load(table_ptr + entry, mask=mask_entry, other=0.0)
    elif BOOK == "lut8":
        row_bytes = (1 << width) + 4
        octets_ptr = table_ptr.to(tl.pointer_type(tl.uint8))
        octet = tl.load(octets_ptr + (rows * row_bytes)[:, None, None, None] + code, mask=mask_entry, other=LUT8_ZERO)
        scale_ptr = table_ptr.to(tl.pointer_type(tl.float32)) + rows * (row_bytes // 4) + (1 << width) // 4
        scale = tl.load(scale_ptr, mask=mask_rows, other=0.0)
        return scale[:, None, None, None] * (octet.to(tl.float32) - LUT8_ZERO)
    else:
        half = (1 << (width - 1)).to(tl.float32)
        if BOOK == "affine":
            row_ptr = table_ptr.to(tl.pointer_type(tl.float32)) + 2 * rows
            scale = tl.load(row_ptr, mask=mask_rows, other=0.0)[:, None, None, None]
            offset = tl.load(row_ptr + 1, mask=mask_rows, other=0.0)[:, None, None, None]
            return scale * (code.to(tl.float32) + 0.5 - half) + offset
        else:
            v = code.to(tl.float32) / half - 1.0
            row_ptr = table_ptr + 4 * rows
            value = tl.zeros_like(v)
            for power in tl.static_range(4):
                coefficient = tl.load(row_ptr + power, mask=mask_rows, other=0.0).to(tl.float32)
                value = value * v + coefficient[:, None, None, None]
            return value


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
    BOOK: tl.constexpr = "lut16",
):
    """(BLOCK_N, 32 * WORDS) weights in stored order: the values of code(n, k), finite where masked.

    frames_ptr: the linear-block's addresses [P, frames]; only the first `width` planes are read.
    table_ptr: to its table of that width in the codebook BOOK, whatever its type, as a pointer to fp16.
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
    value = load_values(table_ptr, width, rows, mask_rows, code, mask_entry, BOOK)
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
    BOOKS: tl.constexpr,
    BOOK_WIDTHS: tl.constexpr,
):
    """acc[m, n] + sum_k x[m, k] * w[n, k] over all K columns of a linear-block.

    BOOKS: codebooks in use. BOOK_WIDTHS: for each, the set of its widths, bit b for width b.
    x_ptr: (BLOCK_M,) pointers to permuted input rows of ceil(K / 64) * 64 entries; padding entries may be anything.
    """
    if len(BOOKS) == 1:
        acc = _add_product(
            acc, x_ptr, mask_tokens, frames_ptr, table_ptr, width, rows, mask_rows, frames,
            K, BLOCK_N, WORDS, ROWS_PER_FRAME, OPERAND, book_at(BOOKS, 0),
        )  # fmt: skip
    else:
        # A loop for each codebook, of which a linear-block runs one: nothing is chosen between inside a loop.
        for i in tl.static_range(len(BOOKS)):
            if (BOOK_WIDTHS[i] >> width) & 1:
                acc = _add_product(
                    acc, x_ptr, mask_tokens, frames_ptr, table_ptr, width, rows, mask_rows, frames,
                    K, BLOCK_N, WORDS, ROWS_PER_FRAME, OPERAND, book_at(BOOKS, i),
                )  # fmt: skip
    return acc


@triton.jit
def _add_product(
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
    BOOK: tl.constexpr,
):
    STORED: tl.constexpr = (K + 63) // 64 * 64
    BLOCK_K: tl.constexpr = 32 * WORDS
    for first in range(0, STORED, BLOCK_K):
        position = first + tl.arange(0, BLOCK_K)
        mask_k = position < STORED
        if STORED != K:
            mask_k = mask_k & (column_at(position, K) < K)
        x = tl.load(x_ptr[:, None] + position[None, :], mask=mask_tokens[:, None] & mask_k[None, :], other=0.0)
        weights = load_weights(
            frames_ptr, table_ptr, width, rows, mask_rows, first // 32, frames, K, BLOCK_N, WORDS, ROWS_PER_FRAME, BOOK
        )
        acc = tl.dot(x.to(OPERAND), tl.trans(weights.to(OPERAND)), acc, input_precision="ieee")
    return acc


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """What add_product multiplies: the inputs' own type, or fp32 for bf16 in the interpreter."""
    if dtype is torch.bfloat16 and not isinstance(add_product, triton.JITFunction):
        # The interpreter would multiply the bit patterns.
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
