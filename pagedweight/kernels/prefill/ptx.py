"""The decoders of `assembly` as kernel functions."""

from __future__ import annotations

from itertools import product

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedweight.kernels.prefill import assembly

_KINDS = [
    (bits, codebook)
    for bits in range(2, 9)
    for codebook in ("lut16", "lut8", "affine", "cubic")
    if codebook != "lut8" or bits <= 4
]
# In constexprs, so that Triton's cache sees the text change.
_CODES = tl.constexpr({kind: assembly.codes_program(*kind) for kind in _KINDS})
_WORDS = tl.constexpr({kind: assembly.code_words(*kind) for kind in _KINDS})
_STEP_WORDS = tl.constexpr(
    {(*kind, step): assembly.step_words(*kind, step) for kind in _KINDS for step in range(assembly.STEPS)}
)
_VALUES = tl.constexpr(
    {
        (*kind, bf16, *piece): assembly.values_program(*kind, bf16, *piece)
        for kind in _KINDS
        for bf16 in (False, True)
        for piece in product(range(assembly.STEPS), (0, 1), (0, 1))
    }
)


number_bias = triton.constexpr_function(assembly.number_bias)
has_line = triton.constexpr_function(assembly.has_line)


@triton.constexpr_function
def _codes(bits, codebook, part):
    return _CODES.value[bits, codebook][part]


@triton.constexpr_function
def _codes_dtype(bits, codebook):
    return (tl.int32,) * _WORDS.value[bits, codebook]


@triton.constexpr_function
def _values(bits, codebook, bf16, step, side, half, part):
    return _VALUES.value[bits, codebook, bf16, step, side, half][part]


@triton.constexpr_function
def _values_dtype(bf16):
    return (tl.bfloat16 if bf16 else tl.float16,) * 2


@triton.constexpr_function
def _step_words(bits, codebook, step):
    return _STEP_WORDS.value[bits, codebook, step]


@gluon.jit
def code_words(planes, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    """planes: BITS tensors (R, W) int32, most significant first. The words of codes that `step_values` takes."""
    return gl.inline_asm_elementwise(
        _codes(BITS, CODEBOOK, 0),
        _codes(BITS, CODEBOOK, 1),
        planes,
        dtype=_codes_dtype(BITS, CODEBOOK),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def piece_values(
    words, table, BITS: tl.constexpr, CODEBOOK: tl.constexpr, BF16: tl.constexpr, STEP: tl.constexpr,
    SIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """2 tensors (R, W) of 16-bit values: tensor i is column W (16 SIDE + 4 STEP + 2 HALF + i) + w of the block."""
    CHOSEN: tl.constexpr = _step_words(BITS, CODEBOOK, STEP)
    chosen = ()
    for i in tl.static_range(len(CHOSEN)):
        chosen = chosen + (words[CHOSEN[i]],)  # noqa: RUF005
    return gl.inline_asm_elementwise(
        _values(BITS, CODEBOOK, BF16, STEP, SIDE, HALF, 0),
        _values(BITS, CODEBOOK, BF16, STEP, SIDE, HALF, 1),
        chosen + table,
        dtype=_values_dtype(BF16),
        is_pure=True,
        pack=2,
    )
