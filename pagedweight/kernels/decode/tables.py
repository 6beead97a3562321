"""A row's table as decoder operands, per codebook; what does not fit an operand is a factor of the row's sum.

`table_operands` is what decoders look up: lut16's entries, lut8's bytes, cubic's coefficients. lut8 and affine leave
bytes, and `byte_line` says what a row makes of them: values are factor * byte + shift.
"""

# ruff: noqa: RUF005 - kernels join tuples with +; they cannot unpack them.
from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import ptx

LUT8_ZERO = tl.constexpr(64)
LUT16_LARGEST = tl.constexpr(8000.0)  # the largest entry of a lut16 row as an integer of two digits of seven bits
LUT16_ZERO = tl.constexpr(8256.0)  # 64 * 128 + 64: what makes both digits positive
SMALLEST_PEAK = tl.constexpr(1e-30)


@triton.jit
def _words(address, row, FIRST: tl.constexpr, COUNT: tl.constexpr, ROW_WORDS: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.int32)) + row[:, None] * ROW_WORDS + FIRST
    words = ()
    for i in tl.static_range(COUNT):
        words = words + (tl.load(pointer + i),)
    return words


@triton.jit
def as_loaded(value, address, never):
    """`value`, by way of a load that never reads: an operand computed from row numbers would make the compiler move
    every decoded weight through shared memory, one that was loaded does not."""
    return tl.load(address.to(tl.pointer_type(value.dtype)) + tl.zeros_like(value), never, other=value)


@triton.jit
def lut8_words(address, row, BITS: tl.constexpr):
    """A lut8 row's bytes, four in each of 2 or 4 tensors (R, 1) int32."""
    words = _words(address, row, 0, 2**BITS // 4, 2**BITS // 4 + 1)
    if BITS == 2:
        return (words[0], words[0])
    else:
        return words


@triton.jit
def _octets(first, second, third, fourth, SHIFT: tl.constexpr):
    """The seven bits from SHIFT on of four words, a byte each."""
    return (
        ((first >> SHIFT) & 127)
        | (((second >> SHIFT) & 127) << 8)
        | (((third >> SHIFT) & 127) << 16)
        | (((fourth >> SHIFT) & 127) << 24)
    )


@triton.jit
def _rounded_entry(entry, peak):
    """fp32 entry of a table whose largest is `peak`, as an int32 whose low 14 bits are entry / peak * 8000 + 8256."""
    # Beyond 2^23 a float has no fraction: its last bits are the rounded number.
    return (entry * (LUT16_LARGEST / peak) + (8388608.0 + LUT16_ZERO)).to(tl.int32, bitcast=True)


@triton.jit
def _half(word, HIGH: tl.constexpr):
    """fp32 of one of the two fp16 in an int32."""
    bits = word >> 16 if HIGH else word & 0xFFFF
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def lut16_words(address, row, BITS: tl.constexpr):
    """A lut16 row's entries as two numbers of seven bits, high * 128 + low: the bytes of each, four in each of 2 or 4
    tensors (R, 1) int32."""
    words = _words(address, row, 0, 2**BITS // 2, 2**BITS // 2)
    peak = tl.full(row[:, None].shape, SMALLEST_PEAK, tl.float32)
    for i in tl.static_range(len(words)):
        peak = tl.maximum(peak, tl.maximum(tl.abs(_half(words[i], False)), tl.abs(_half(words[i], True))))
    low = ()
    high = ()
    for i in tl.static_range(len(words) // 2):
        a = _rounded_entry(_half(words[2 * i], False), peak)
        b = _rounded_entry(_half(words[2 * i], True), peak)
        c = _rounded_entry(_half(words[2 * i + 1], False), peak)
        d = _rounded_entry(_half(words[2 * i + 1], True), peak)
        low = low + (_octets(a, b, c, d, 0),)
        high = high + (_octets(a, b, c, d, 7),)
    if BITS == 2:
        return (low[0], low[0]), (high[0], high[0])
    else:
        return low, high


@triton.jit
def _lut16_peak(address, row, BITS: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.float16)) + row[:, None] * 2**BITS + tl.arange(0, 2**BITS)[None, :]
    return tl.maximum(tl.max(tl.abs(tl.load(pointer).to(tl.float32)), 1), SMALLEST_PEAK)


@triton.jit
def portable_lut16(codes, address, row, BITS: tl.constexpr):
    """(low, high) int32 of codes (R, 512), as the bytes of `lut16_words`."""
    entry = tl.load(address.to(tl.pointer_type(tl.float16)) + row[:, None] * 2**BITS + codes).to(tl.float32)
    rounded = _rounded_entry(entry, tl.expand_dims(_lut16_peak(address, row, BITS), 1))
    return rounded & 127, (rounded >> 7) & 127


@triton.jit
def byte_line(address, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    """(factor, shift) fp32 (R,): values are factor * byte + shift; affine bytes are codes, code - 128 at 8 bits, and
    lut16 has high * 128 + low for its byte."""
    if CODEBOOK == "lut16":
        factor = _lut16_peak(address, row, BITS) / LUT16_LARGEST
        return factor, factor * -LUT16_ZERO
    elif CODEBOOK == "lut8":
        ENTRY_WORDS: tl.constexpr = 2**BITS // 4
        pointer = address.to(tl.pointer_type(tl.float32)) + row * (ENTRY_WORDS + 1)
        factor = tl.load(pointer + ENTRY_WORDS)
        return factor, factor * -LUT8_ZERO
    else:
        pointer = address.to(tl.pointer_type(tl.float32)) + 2 * row
        scale = tl.load(pointer)
        middle: tl.constexpr = 0.5 if BITS == 8 else 0.5 - 2 ** (BITS - 1)
        return scale, tl.load(pointer + 1) + middle * scale


@triton.jit
def _pair(value):
    """A 16-bit float twice in an int32."""
    return (value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def _lut16_operands(words, BITS: tl.constexpr, BF16: tl.constexpr):
    entries = ()
    for i in tl.static_range(len(words)):
        entries = entries + (ptx.half_pairs(words[i], BF16),)
    low = ()
    high = ()
    for i in tl.static_range(len(words) // 2):
        low = low + (ptx.low_bytes(entries[2 * i], entries[2 * i + 1]),)
        high = high + (ptx.high_bytes(entries[2 * i], entries[2 * i + 1]),)
    if BITS == 2:
        return (low[0], low[0], high[0], high[0])
    else:
        return low + high


@triton.jit
def table_operands(address, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr, BF16: tl.constexpr):
    """The table operands (R, 1) that `ptx.decode_words` takes."""
    if CODEBOOK == "lut16":
        if BITS <= 4:
            return _lut16_operands(_words(address, row, 0, 2**BITS // 2, 2**BITS // 2), BITS, BF16)
        else:
            return (as_loaded(address + row[:, None].to(tl.int64) * (2 * 2**BITS), address, row[:, None] < 0),)
    elif CODEBOOK == "lut8":
        return lut8_words(address, row, BITS)
    else:
        pointer = address.to(tl.pointer_type(tl.float16)) + row[:, None] * 4
        return (
            _pair(tl.load(pointer)),
            _pair(tl.load(pointer + 1)),
            _pair(tl.load(pointer + 2)),
            _pair(tl.load(pointer + 3)),
        )


@triton.jit
def portable_values(codes, address, row, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    """fp32 values of codes (R, 512); of lut8 and affine, the bytes of `byte_line`."""
    if CODEBOOK == "lut16":
        pointer = address.to(tl.pointer_type(tl.float16)) + row[:, None] * 2**BITS
        return tl.load(pointer + codes).to(tl.float32)
    elif CODEBOOK == "lut8":
        pointer = address.to(tl.pointer_type(tl.uint8)) + row[:, None] * (2**BITS + 4)
        return tl.load(pointer + codes).to(tl.float32)
    elif CODEBOOK == "affine":
        return (codes - (128 if BITS == 8 else 0)).to(tl.float32)
    else:
        pointer = address.to(tl.pointer_type(tl.float16)) + row[:, None] * 4
        v = (codes - 2 ** (BITS - 1)).to(tl.float32) / 2 ** (BITS - 1)
        value = tl.load(pointer).to(tl.float32)
        for power in tl.static_range(1, 4):
            value = value * v + tl.load(pointer + power).to(tl.float32)
        return value
