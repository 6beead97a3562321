"""Inline PTX of the prefill products: plane words to tensor-core operands, in two halves.

The first half turns a word of every plane into words of codes, once per 512 columns. The second turns the codes of one
piece (32 columns) into 16-bit values just before the product that takes them, so that few registers wait and the
product before runs meanwhile.

Piece (t, side, half) of a block is columns W j + w with j = 16 side + 4 t + 2 half + {0, 1}; side 0 lies in even words,
side 1 in odd ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedweight.kernels.decode import assembly
from pagedweight.kernels.decode.assembly import Program

STEPS = 4  # of a block
_VALUES = 2  # registers of two values that one piece makes of a pair of words


def has_line(codebook: str) -> bool:
    """Whether operands are numbers and a row's values a line of them: its shift takes the sum of the row's input."""
    return codebook in ("lut8", "affine")


def number_bias(bits: int, codebook: str, bf16: bool) -> int:
    """What operands of lut8 and affine have beyond the byte of `tables.byte_line`."""
    if codebook == "affine" and bits == 8:
        return 0 if bf16 else 1024 + 128
    return 128 if bf16 else 1024


def code_words(bits: int, codebook: str) -> int:
    """Words of codes that the first half makes of a word of every plane."""
    if codebook in ("lut16", "lut8") and bits <= 4:
        return 5 if (codebook, bits) == ("lut16", 4) else 4
    return 8


def step_words(bits: int, codebook: str, step: int) -> tuple[int, ...]:
    """Which words of codes a step takes."""
    if code_words(bits, codebook) == 8:
        return step, step + 4
    return (step, 4) if code_words(bits, codebook) == 5 else (step,)


def codes_program(bits: int, codebook: str) -> tuple[str, str]:
    """(PTX, constraints), pack 1: a word of every plane, most significant first, to `code_words` words."""
    q = Program()
    outputs = code_words(bits, codebook)
    planes = [f"${outputs + plane}" for plane in range(bits)]
    if outputs == 8:
        words = assembly._bytes(q, planes)
    elif outputs == 5:  # the top plane picks between two tables of eight
        words = [*assembly._nibbles(q, [None, *planes[1:]]), planes[0]]
    else:
        words = assembly._nibbles(q, [None] * (4 - bits) + planes)
    return q.text(words), ",".join(["=r"] * outputs + ["r"] * bits)


def values_program(bits: int, codebook: str, bf16: bool, step: int, side: int, half: int) -> tuple[str, str]:
    """(PTX, constraints), pack 2: `step_words` and the row's table operands to 2 registers of two values."""
    q = Program()
    count = len(step_words(bits, codebook, step))
    registers = assembly.table_registers(bits, codebook)
    first = _VALUES + 2 * count
    table = [f"${first + 2 * i}" for i in range(registers)]
    words = [f"${_VALUES + 2 * i + side}" for i in range(count)]
    if codebook == "lut16" and bits <= 4:
        outputs = _lut16(q, words, table, step, half)
    elif codebook == "lut16":
        outputs = _lut16_gather(q, words, table, bf16, half)
    elif codebook == "lut8":
        outputs = _lut8(q, words[0], bits, table, bf16, half)
    elif codebook == "affine":
        outputs = _affine(q, words, bits, bf16, half)
    else:
        outputs = _cubic(q, words, bits, table, bf16, half)
    kind = "l" if codebook == "lut16" and bits > 4 else "r"
    return q.text(outputs), ",".join(["=r"] * _VALUES + ["r"] * (2 * count) + [kind] * (2 * registers))


def _lut16(q: Program, words: Sequence[str], table: Sequence[str], step: int, half: int) -> list[str]:
    selector = q.right(words[0], 16 * half)
    looked = [q.permute(*table[i : i + 2], selector) for i in range(0, len(table), 2)]
    if len(words) == 2:
        top = q.right(q.mask(q.right(words[1], step), 0x11111111), 16 * half)
        mask = q.permute("0x0000ff00", "0x00000000", top)
        looked = [q.emit("lop3.b32", mask, looked[i + 1], looked[i], tail=", 0x000000ca") for i in (0, 2)]
    return [q.permute(*looked, "0x6240"), q.permute(*looked, "0x7351")]


def _lut16_gather(q: Program, words: Sequence[str], table: Sequence[str], bf16: bool, half: int) -> list[str]:
    outputs = []
    for word in words:
        loaded = []
        for i in (2 * half, 2 * half + 1):
            code = q.permute(word, "0x0", f"0x{0x4440 + i:04x}")
            address = q.emit("mad.wide.u32", code, 2, table[0], kind="b64")
            loaded.append(q.emit("ld.global.nc.u16", f"[{address}]"))
        outputs.append(assembly._rounded_pair(q, *loaded) if bf16 else q.permute(*loaded, "0x5410"))
    return outputs


def _lut8(q: Program, word: str, bits: int, table: Sequence[str], bf16: bool, half: int) -> list[str]:
    magic, _bias = assembly._magic(bf16)
    looked = q.permute(table[0], table[1], q.right(word, 16 * half))
    if bits == 4:
        flipped = q.right(q.emit("xor.b32", word, "0x88888888"), 16 * half)
        looked = q.emit("or.b32", looked, q.permute(table[2], table[3], flipped))
    return [q.permute(looked, magic, order) for order in ("0x4240", "0x4341")]


def _affine(q: Program, words: Sequence[str], bits: int, bf16: bool, half: int) -> list[str]:
    narrow = bf16 and bits == 8  # bf16 holds the code, but not the code and a bias
    magic, bias = assembly._magic(bf16 and not narrow)
    numbers = [q.permute(word, magic, ("0x4140", "0x4342")[half]) for word in words]
    if not narrow:
        return numbers
    return [assembly._to_bf16(q, assembly._add(q, number, -(bias + 128), False)) for number in numbers]


def _cubic(
    q: Program, words: Sequence[str], bits: int, coefficients: Sequence[str], bf16: bool, half: int
) -> list[str]:
    middle = 1 << (bits - 1)
    magic, bias = assembly._magic(False)
    scale, shift = (assembly._pair(value, False) for value in (1.0 / middle, -(bias + middle) / middle))
    outputs = []
    for word in words:
        u = assembly._fma(q, q.permute(word, magic, ("0x4140", "0x4342")[half]), scale, shift, False)
        value = coefficients[0]
        for coefficient in coefficients[1:]:
            value = assembly._fma(q, value, u, coefficient, False)
        outputs.append(assembly._to_bf16(q, value) if bf16 else value)
    return outputs
