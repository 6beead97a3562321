"""A tile of weights as the left operand of a matrix product: planes from their frames, codes, values.

Two decoders read the same bytes: `ptx.decode_words` builds operands in registers, the portable one below is plain
Triton, for the interpreter, other backends and GPUs before Ampere.
"""

# ruff: noqa: RUF005 - kernels join tuples with +; they cannot unpack them.
from __future__ import annotations

import triton
import triton.language as tl

BLOCK_WORDS = tl.constexpr(16)
BLOCK_COLUMNS = tl.constexpr(512)


@triton.constexpr_function
def tail_words(columns):
    """Words per row of the last, narrower column block; 0 when 512 divides the columns."""
    return -(-(columns % 512) // 64) * 2


@triton.constexpr_function
def column_blocks(columns):
    return -(-columns // 512)


@triton.constexpr_function
def word_alignment(columns):
    """A divisor of every row's first word within a block."""
    tail = -(-(columns % 512) // 64) * 2
    return 16 if tail == 0 else (tail & -tail)


@triton.constexpr_function
def item(values, index):
    """values[index] as a constexpr; plain indexing loses that for strings."""
    return values[index]


@triton.constexpr_function
def index_of(values, value):
    return next(i for i in range(len(values)) if getattr(values[i], "value", values[i]) == value)


@triton.jit
def plane_rows(address_ptr, row, BITS: tl.constexpr, PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr):
    """Per plane, pointers (R,) to the frames that hold the rows; address_ptr: the linear-block's (P, F) addresses.

    Called for the widest width before the committed one is known, so that both loads are under way at once; addresses
    of planes above the committed width may be anything and are not followed.
    """
    frames = ()
    for plane in tl.static_range(BITS):
        address = tl.load(address_ptr + plane * PLANE_FRAMES + row // FRAME_ROWS)
        frames = frames + (tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 128),)
    return frames


@triton.jit
def block_words(block, local, COLUMNS: tl.constexpr, FRAME_ROWS: tl.constexpr):
    """(first word of each row within its frame, words per row) of a column block; local: row within the frame."""
    FULL: tl.constexpr = COLUMNS // BLOCK_COLUMNS
    TAIL: tl.constexpr = tail_words(COLUMNS)
    if TAIL == 0:
        width = block * 0 + BLOCK_WORDS
        first = block * (FRAME_ROWS * BLOCK_WORDS) + local * BLOCK_WORDS
    else:
        width = tl.where(block >= FULL, TAIL, BLOCK_WORDS)
        first = block * (FRAME_ROWS * BLOCK_WORDS) + tl.multiple_of(local * width, word_alignment(COLUMNS))
    return first, width


@triton.jit
def block_columns(block, COLUMNS: tl.constexpr):
    """(column, is one) of the 512 operand columns of each of the blocks (N,): (512, N)."""
    FULL: tl.constexpr = COLUMNS // BLOCK_COLUMNS
    TAIL: tl.constexpr = tail_words(COLUMNS)
    k = tl.arange(0, BLOCK_COLUMNS)[:, None]
    if TAIL == 0:
        column = block[None, :] * BLOCK_COLUMNS + k
        return column, block[None, :] < FULL
    else:
        width = tl.multiple_of(tl.where(block >= FULL, TAIL, BLOCK_WORDS), word_alignment(COLUMNS))[None, :]
        word = k % BLOCK_WORDS
        column = block[None, :] * BLOCK_COLUMNS + (k // BLOCK_WORDS) * width + word
        is_one = (word < width) & (block[None, :] <= FULL)
        if COLUMNS % 64 != 0:
            is_one = is_one & (column < COLUMNS)
        return column, is_one


@triton.jit
def load_words(frames, first, width, block, BITS: tl.constexpr, MASKED: tl.constexpr, COLUMNS: tl.constexpr):
    """A tuple of (R, 16) int32, one per plane; words beyond the block or the matrix are 0."""
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    planes = ()
    for plane in tl.static_range(BITS):
        pointer = frames[plane][:, None] + (first[:, None] + word)
        if MASKED:
            held = (word < width[:, None]) & (block < column_blocks(COLUMNS))[:, None]
            planes = planes + (tl.load(pointer, held, other=0),)
        else:
            planes = planes + (tl.load(pointer),)
    return planes


@triton.jit
def _joined(tensors, HALF: tl.constexpr):
    pairs = ()
    for i in tl.static_range(HALF):
        pairs = pairs + (tl.join(tensors[i], tensors[i + HALF]),)
    return pairs


@triton.jit
def joined(tensors):
    """32 tensors (R, W) -> (R, W, 2, 2, 2, 2, 2), indexed by the bits of the tensor's number, high bit first."""
    return _joined(_joined(_joined(_joined(_joined(tensors, 16), 8), 4), 2), 1)[0]


@triton.jit
def side_by_side(tensors, ROWS: tl.constexpr):
    """32 tensors (ROWS, 16) -> (ROWS, 512), tensor j at columns 16 j ..."""
    return tl.reshape(tl.permute(joined(tensors), (0, 2, 3, 4, 5, 6, 1)), (ROWS, BLOCK_COLUMNS))


@triton.jit
def part(tensors, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """tensors[FIRST : FIRST + COUNT]"""
    chosen = ()
    for i in tl.static_range(COUNT):
        chosen = chosen + (tensors[FIRST + i],)
    return chosen


@triton.jit
def portable_codes(frames, first, width, block, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    """(R, 512) int32 codes of a column block, one load, shift and mask per plane and weight."""
    k = tl.arange(0, BLOCK_COLUMNS)[None, :]
    j = k // BLOCK_WORDS
    w = k % BLOCK_WORDS
    held = (w < width[:, None]) & (block < column_blocks(COLUMNS))[:, None]
    bit = 4 * (4 * ((j >> 1) & 1) + (j & 1) + 2 * (w & 1)) + ((j & 15) >> 2)
    pointer_offset = first[:, None] + (w & 14) + (j >> 4)
    codes = tl.zeros((1, 1), tl.int32)
    for plane in tl.static_range(BITS):
        word = tl.load(frames[plane][:, None] + pointer_offset, held, other=0)
        codes = 2 * codes + ((word >> bit) & 1)
    return codes
