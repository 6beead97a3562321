"""Decoders as kernel functions: the programs of `assembly` and `assembly8`, applied to tensors of plane words."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import assembly, assembly8, assembly_spread

# In a constexpr, so that Triton's cache sees the text change.
_DECODERS = tl.constexpr(
    {
        (bits, codebook, bf16): assembly.decoder_program(bits, codebook, bf16)
        for bits in range(2, 9)
        for codebook in ("lut16", "lut8", "affine", "cubic")
        for bf16 in (False, True)
        if codebook != "lut8" or bits <= 4
    }
)
_LOOK_UPS16 = tl.constexpr({bits: assembly_spread.decoder_program(bits) for bits in assembly_spread.ROW_BYTES})
_COPIES = tl.constexpr({bf16: assembly_spread.copy_program(bf16) for bf16 in (False, True)})
_LANE_WORDS = tl.constexpr(assembly_spread.LANE_WORDS)
_SELECTORS = tl.constexpr({bits: assembly8.selector_program(bits) for bits in range(2, 5)})
_BYTES = tl.constexpr({bits: assembly8.byte_program(bits) for bits in range(2, 9)})
_LOOK_UPS = tl.constexpr({bits: assembly8.look_up_program(bits) for bits in range(2, 5)})
_SPREAD = tl.constexpr(assembly8.spread_program())
LOW_BYTES = tl.constexpr(assembly.LOW_BYTES)
HIGH_BYTES = tl.constexpr(assembly.HIGH_BYTES)
_FLOAT_PAIRS = tl.constexpr({bf16: assembly.float_pair_program(bf16) for bf16 in (False, True)})


@triton.constexpr_function
def _decoder(bits, codebook, bf16, spread, part):
    return _LOOK_UPS16.value[bits][part] if spread else _DECODERS.value[bits, codebook, bf16][part]


@triton.constexpr_function
def _copy(bf16, part):
    return _COPIES.value[bf16][part]


_room = triton.constexpr_function(assembly_spread.room_program)


@triton.constexpr_function
def _int8_words(bits, codebook, part):
    return (_BYTES if codebook == "affine" else _SELECTORS).value[bits][part]


@triton.constexpr_function
def _int8_words_dtype(bits, codebook):
    return (tl.int32,) * (16 if codebook != "affine" and bits == 4 else 8)


@triton.constexpr_function
def _int8_values(bits, codebook, part):
    return (_SPREAD.value if codebook == "affine" else _LOOK_UPS.value[bits])[part]


@triton.constexpr_function
def _int8_values_dtype():
    return (tl.int8,) * 32


number_bias = triton.constexpr_function(assembly.number_bias)


@triton.constexpr_function
def _float_pair(bf16):
    return _FLOAT_PAIRS.value[bf16]


@triton.constexpr_function
def _outputs_dtype(bf16):
    return (tl.bfloat16 if bf16 else tl.float16,) * 32


@triton.jit
def decode_words(planes, table, BITS: tl.constexpr, CODEBOOK: tl.constexpr, BF16: tl.constexpr, SPREAD: tl.constexpr):
    """planes: BITS tensors (R, W) int32; table: operands (R, 1), with SPREAD of `spread.copied`. 32 tensors (R, W):
    element w of tensor j is column W j + w of the block."""
    return tl.inline_asm_elementwise(
        _decoder(BITS, CODEBOOK, BF16, SPREAD, 0),
        _decoder(BITS, CODEBOOK, BF16, SPREAD, 1),
        planes + table,
        dtype=_outputs_dtype(BF16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int8_words(planes, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    """planes: BITS tensors (R, W) int32. 8 tensors (R, W) of codes, as `int8_values` takes them; 16 for 4-bit lut8."""
    return tl.inline_asm_elementwise(
        _int8_words(BITS, CODEBOOK, 0),
        _int8_words(BITS, CODEBOOK, 1),
        planes,
        dtype=_int8_words_dtype(BITS, CODEBOOK),
        is_pure=True,
        pack=1,
    )


@triton.jit
def int8_values(words, table, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    """The words of `int8_words`, and the table words (R, 1) where codes are looked up. 32 tensors (R, W) int8: element
    4 m + i of tensor 4 s + g comes from code i of words[s] at word 4 m + g."""
    return tl.inline_asm_elementwise(
        _int8_values(BITS, CODEBOOK, 0),
        _int8_values(BITS, CODEBOOK, 1),
        words + table,
        dtype=_int8_values_dtype(),
        is_pure=True,
        pack=4,
    )


@triton.jit
def half_pairs(word, BF16: tl.constexpr):
    """Two fp16 in an int32 as two values of the operand's dtype."""
    return tl.inline_asm_elementwise(_float_pair(BF16), "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def low_bytes(first, second):
    """The low bytes of the four 16-bit values in two words."""
    return tl.inline_asm_elementwise(LOW_BYTES, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def high_bytes(first, second):
    """The high bytes of the four 16-bit values in two words."""
    return tl.inline_asm_elementwise(HIGH_BYTES, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def shared_room(SIZE: tl.constexpr):
    """The address, int32, of SIZE bytes of shared memory besides the compiler's; every call in a kernel has its own."""
    return tl.inline_asm_elementwise(_room(SIZE), "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def copy_entries(low, high, words, BF16: tl.constexpr):
    """Copies a part of two tables, at the global addresses `low` and `high`, to the shared words at `words`."""
    tl.inline_asm_elementwise(_copy(BF16, 0), _copy(BF16, 1), [low, high, words], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def lane_words(room):
    """Where this lane's words begin. Not pure: it stays behind a barrier, and so do look-ups, which need it."""
    return tl.inline_asm_elementwise(_LANE_WORDS, "=r,r", [room], dtype=tl.int32, is_pure=False, pack=1)
