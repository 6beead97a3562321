"""The product both launches are made of: a tile of rows, decoded once into registers, times up to 128 tokens.

Weights are the left operand of Hopper's warp-group products and never touch shared memory; tokens arrive there by
`cp.async`, a few steps of 128 columns ahead. While a step's product runs, the same warps decode the next
step's weights.
"""

# ruff: noqa: RUF005 - kernels join tuples with +; they cannot unpack them.
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from pagedweight.kernels.decode import tables
from pagedweight.kernels.prefill import ptx

STEP_COLUMNS = tl.constexpr(128)
PIECE_COLUMNS = tl.constexpr(32)
STAGES = tl.constexpr(4)
AHEAD = tl.constexpr(2)  # a stage is free when the product two steps before is done by every warp
# Triton 3.6 and 3.9 name it differently.
_copy = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared


@triton.constexpr_function
def product_layout(rows, tokens):
    """Of the sums (rows, tokens): 16 rows a warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[rows // 16, 1], instr_shape=[16, tokens, 16])


@triton.constexpr_function
def weight_layout(rows, tokens):
    return gl.DotOperandLayout(0, product_layout(rows, tokens), 2)


@triton.constexpr_function
def row_layout(rows, tokens):
    """Of what a row of weights has one of, beside its words."""
    return gl.SliceLayout(1, weight_layout(rows, tokens))


@triton.constexpr_function
def narrow_layout(rows):
    """Of (rows, 8) words, eight to a row where the operand has sixteen: all four threads of a row still hold two."""
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], warps, [], [rows, 8])


@triton.constexpr_function
def token_copy_layout(warps):
    return gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])


@triton.constexpr_function
def word_copy_layout(warps):
    return gl.BlockedLayout([1, 4], [8, 4], [warps, 1], [1, 0])


@triton.constexpr_function
def tail_words(columns):
    return -(-(columns % 512) // 64) * 2


@triton.constexpr_function
def tail_width(columns):
    """Words that an operand has for each row's tail block: 0, 8 or 16."""
    tail = -(-(columns % 512) // 64) * 2
    return 0 if tail == 0 else (8 if tail <= 8 else 16)


@triton.constexpr_function
def word_alignment(columns):
    """A divisor of the words a row has in any block."""
    tail = -(-(columns % 512) // 64) * 2
    return 16 if tail == 0 else tail & -tail


@gluon.jit
def _side_by_side(tensors, ROWS: tl.constexpr):
    """2 tensors (ROWS, 16) or 4 tensors (ROWS, 8) -> (ROWS, 32), one tensor's columns after the other's."""
    if len(tensors) == 4:
        joined = gl.join(gl.join(tensors[0], tensors[2]), gl.join(tensors[1], tensors[3]))
        return gl.reshape(gl.permute(joined, (0, 2, 3, 1)), (ROWS, PIECE_COLUMNS))
    else:
        return gl.reshape(gl.permute(gl.join(tensors[0], tensors[1]), (0, 2, 1)), (ROWS, PIECE_COLUMNS))


@gluon.jit
def _table_operands(address, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr, BF16: tl.constexpr):
    if CODEBOOK == "lut16" and BITS > 4:
        return (address + row[:, None].to(gl.int64) * (2 * 2**BITS),)
    elif CODEBOOK == "affine":
        return ()
    else:
        return tables.table_operands(address, row, BITS, CODEBOOK, BF16)


@gluon.jit
def _copy_words(
    words_smem, address_ptr, row, block, FIRST: tl.constexpr, LAST: tl.constexpr, PLANE_FRAMES: tl.constexpr,
    FRAME_ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Start copying a block's words of planes [FIRST, LAST); row: (ROWS,) in the copy's layout."""
    FULL: tl.constexpr = COLUMNS // 512
    TAIL: tl.constexpr = tail_words(COLUMNS)
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, word_copy_layout(WARPS)))
    local = row % FRAME_ROWS
    first = block * (FRAME_ROWS * 16)
    if TAIL == 0:
        offset = (first + local * 16)[:, None] + word[None, :]
        held = (block < FULL) & (row >= 0)
    else:
        width = tl.multiple_of(tl.where(block < FULL, 16, TAIL), word_alignment(COLUMNS))
        offset = (first + local * width)[:, None] + word[None, :]
        held = (block <= FULL) & (row >= 0)
    held = held[:, None] & (word >= 0)[None, :]
    if TAIL != 0:
        held = held & (word < width)[None, :]
    for plane in tl.static_range(FIRST, LAST):
        address = gl.load(address_ptr + plane * PLANE_FRAMES + row // FRAME_ROWS)
        pointer = address.to(gl.pointer_type(gl.int32), bitcast=False)
        _copy(words_smem[plane], gl.multiple_of(pointer, 128)[:, None] + offset, held)


@gluon.jit
def _copy_tokens(
    stage, x_ptr, x_start, x_used, step, COLUMNS: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Start copying the tokens' columns of a step, (N, 128)."""
    k = gl.arange(0, STEP_COLUMNS, layout=gl.SliceLayout(0, token_copy_layout(WARPS)))
    first = (step // 4) * 512 + (step % 4) * 64
    if tail_width(COLUMNS) == 8:
        FULL_STEPS: tl.constexpr = 4 * (COLUMNS // 512)
        narrow = step >= FULL_STEPS
        first = tl.where(narrow, FULL_STEPS * 128 + (step - FULL_STEPS) * 64, first)
        column = first + (k // 64) * tl.where(narrow, 32, 256) + (k // 32 % 2) * tl.where(narrow, 128, 32) + k % 32
    else:
        column = first + (k // 64) * 256 + k % 64
    held = x_used & (step < STEPS)
    pointer = x_ptr + (x_start[:, None] + tl.multiple_of(column, 8)[None, :])
    _copy(stage, pointer, held[:, None] & (k >= 0)[None, :])


@gluon.jit
def _await_step():
    """Until this step's tokens, and the words that came with them, are there for every warp's products."""
    # No proxy fence: Triton's own pipelines need none between cp.async and these products.
    hopper.async_copy.wait_group(AHEAD - 1)
    tl.debug_barrier()


@gluon.jit
def _add_piece(tensors, sums, stage, piece: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Start the product of a piece's weights with its tokens. While it runs the next piece is decoded."""
    weights = gl.convert_layout(_side_by_side(tensors, ROWS), weight_layout(ROWS, TOKENS), assert_trivial=True)
    tokens = stage.slice(piece * PIECE_COLUMNS, PIECE_COLUMNS, dim=1).permute((1, 0))
    return hopper.warpgroup_mma(weights, tokens, sums, is_async=True)


@gluon.jit
def _load_words(words_smem, LAYOUT: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    planes = ()
    for plane in tl.static_range(BITS):
        planes = planes + (words_smem[plane].slice(0, WORDS, dim=1).load(LAYOUT),)
    return ptx.code_words(planes, BITS, CODEBOOK)


@gluon.jit
def _narrow_values(
    words, operands, BITS: tl.constexpr, CODEBOOK: tl.constexpr, BF16: tl.constexpr, STEP: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """A piece of the narrow tail: both halves of a side."""
    first = ptx.piece_values(words, operands, BITS, CODEBOOK, BF16, STEP, SIDE, 0)
    return first + ptx.piece_values(words, operands, BITS, CODEBOOK, BF16, STEP, SIDE, 1)


@gluon.jit
def tile_product(
    x_ptr, x_start, x_used, address_ptr, table, copy_row, operand_row, narrow_row, words_smem, x_smem,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, COLUMNS: tl.constexpr, PLANE_FRAMES: tl.constexpr,
    FRAME_ROWS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """fp32 (ROWS, TOKENS): rows of a linear-block times tokens; for lut8 and affine, before the row's line.

    x_start, x_used: (TOKENS,) first element of a token's columns, in operand order; whether there is a token.
    copy_row, operand_row, narrow_row: the rows, in the layouts of the copy and of the operand's words.
    """
    TAIL: tl.constexpr = tail_width(COLUMNS)
    BLOCKS: tl.constexpr = COLUMNS // 512 + (TAIL == 16)
    STEPS: tl.constexpr = 4 * BLOCKS + 2 * (TAIL == 8)
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    operands = _table_operands(table, operand_row, BITS, CODEBOOK, BF16)
    _copy_words(words_smem, address_ptr, copy_row, 0, 0, BITS, PLANE_FRAMES, FRAME_ROWS, COLUMNS, WARPS)
    for ahead in tl.static_range(AHEAD):
        _copy_tokens(x_smem[ahead], x_ptr, x_start, x_used, ahead, COLUMNS, STEPS, WARPS)
        hopper.async_copy.commit_group()
    sums = gl.zeros((ROWS, TOKENS), gl.float32, product_layout(ROWS, TOKENS))
    hopper.async_copy.wait_group(AHEAD - 1)
    tl.debug_barrier()
    for block in range(0, BLOCKS):
        words = _load_words(words_smem, weight_layout(ROWS, TOKENS), 16, BITS, CODEBOOK)
        for part in tl.static_range(4):
            for piece in tl.static_range(4):
                values = ptx.piece_values(words, operands, BITS, CODEBOOK, BF16, part, piece // 2, piece % 2)
                if piece == 0:
                    _await_step()
                running = _add_piece(values, sums, x_smem[part], piece, ROWS, TOKENS)
                if piece == 0:
                    later = 4 * block + part + AHEAD
                    _copy_tokens(x_smem[(part + AHEAD) % STAGES], x_ptr, x_start, x_used, later, COLUMNS, STEPS, WARPS)
                    if part < 2:
                        # Every warp has taken its words of this block. Half the planes at a time: they come from far.
                        _copy_words(
                            words_smem, address_ptr, copy_row, block + 1, part * BITS // 2, (part + 1) * BITS // 2,
                            PLANE_FRAMES, FRAME_ROWS, COLUMNS, WARPS,
                        )  # fmt: skip
                    hopper.async_copy.commit_group()
                # The product before this one is done, so that its weights' registers are free.
                sums = hopper.warpgroup_mma_wait(1, [running])
    if TAIL == 8:
        operands = _table_operands(table, narrow_row, BITS, CODEBOOK, BF16)
        words = _load_words(words_smem, narrow_layout(ROWS), 8, BITS, CODEBOOK)
        for part in tl.static_range(2):
            for piece in tl.static_range(4):
                values = _narrow_values(words, operands, BITS, CODEBOOK, BF16, 2 * part + piece // 2, piece % 2)
                if piece == 0:
                    _await_step()
                running = _add_piece(values, sums, x_smem[part], piece, ROWS, TOKENS)
                if piece == 0:
                    hopper.async_copy.commit_group()  # of nothing: waits count groups
                sums = hopper.warpgroup_mma_wait(1, [running])
    # The last copies bring nothing but zeros, into shared memory that what follows may use.
    hopper.async_copy.wait_group(0)
    return hopper.warpgroup_mma_wait(0, [sums])
