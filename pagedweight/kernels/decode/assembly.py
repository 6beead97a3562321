"""Inline PTX: words of bit-planes to 16-bit tensor-core operands, in registers; `assembly8` holds that of int8.

A program takes two neighbouring words (w, w + 1), w even, of each plane of one row and gives 32 registers of two
16-bit values: register j holds columns W j + w (low half) and W j + w + 1 (high half) of a block of W words. Four
planes become nibbles by two rounds of exchanges, half an instruction per weight, instead of a shift, a mask and an or
per plane and weight; `prmt` is then a byte table of eight entries that answers four look-ups at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_OUTPUTS = 32
_SELECT = 0xCA  # lop3: a ? b : c, bit by bit


class Program:
    """Lines of PTX over fresh registers; equal instructions are emitted once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[str, str] = {}

    def emit(self, instruction: str, *operands: object, kind: str = "b32", tail: str = "") -> str:
        """Emit `instruction register, operands tail` and return the register."""
        arguments = ", ".join(map(str, operands)) + tail
        key = f"{instruction} {arguments}"
        if key not in self._known:
            register = self._known[key] = f"{kind}_{len(self._known)}"
            self.lines.append(f"{instruction} {register}, {arguments};")
        return self._known[key]

    def right(self, word: str, bits: int) -> str:
        return word if bits == 0 else self.emit("shr.u32", word, bits)

    def left(self, word: str, bits: int) -> str:
        return self.emit("shl.b32", word, bits)

    def mask(self, word: str, mask: int) -> str:
        return self.emit("and.b32", word, _hex(mask))

    def select(self, mask: int, ones: str, zeros: str) -> str:
        return self.emit("lop3.b32", _hex(mask), ones, zeros, tail=f", {_hex(_SELECT)}")

    def permute(self, low: object, high: object, selector: object) -> str:
        return self.emit("prmt.b32", low, high, selector)

    def text(self, outputs: Sequence[str]) -> str:
        """The block for inline assembly: register declarations, instructions, moves to $0, $1, ..."""
        kinds = {}
        for register in self._known.values():
            kinds.setdefault(register.split("_")[0], []).append(register)
        lines = [f".reg .{kind} {', '.join(registers)};" for kind, registers in kinds.items()]
        moves = [f"mov.b32 ${i}, {register};" for i, register in enumerate(outputs)]
        return "{\n" + "\n".join(lines + self.lines + moves) + "\n}"


def _hex(value: int) -> str:
    return f"0x{value & 0xFFFFFFFF:08x}"


def _pair(value: float, bf16: bool) -> str:
    """A 16-bit float twice in a word."""
    half = int(np.float32(value).view(np.uint32)) >> 16 if bf16 else int(np.float16(value).view(np.uint16))
    return _hex(half * 0x10001)


def _exchange(q: Program, high: str | None, low: str | None, mask: int, shift: int) -> tuple[str | None, str | None]:
    """(high's masked bits over low's shifted down, high's shifted up over low's unmasked bits); None is all zeros."""
    if high is None and low is None:
        return None, None
    if high is None:
        return q.mask(q.right(low, shift), ~mask), q.mask(low, ~mask)
    if low is None:
        return q.mask(high, mask), q.mask(q.left(high, shift), mask)
    return q.select(mask, high, q.right(low, shift)), q.select(mask, q.left(high, shift), low)


def _nibbles(q: Program, planes: Sequence[str | None]) -> list[str]:
    """Four planes, most significant first, as four words: nibble i of word j is the code at bit 4 i + j."""
    odd_high, even_high = _exchange(q, planes[0], planes[1], 0xAAAAAAAA, 1)
    odd_low, even_low = _exchange(q, planes[2], planes[3], 0xAAAAAAAA, 1)
    word3, word1 = _exchange(q, odd_high, odd_low, 0xCCCCCCCC, 2)
    word2, word0 = _exchange(q, even_high, even_low, 0xCCCCCCCC, 2)
    return [word0, word1, word2, word3]


def _bytes(q: Program, planes: Sequence[str]) -> list[str]:
    """Planes, most significant first, as eight words: byte i of word j is the code at bit 8 i + j."""
    if len(planes) <= 4:
        words = _nibbles(q, [None] * (4 - len(planes)) + list(planes))
        return [q.mask(q.right(word, shift), 0x0F0F0F0F) for shift in (0, 4) for word in words]
    padded = [None] * (8 - len(planes)) + list(planes)
    pairs = list(zip(_nibbles(q, padded[:4]), _nibbles(q, padded[4:]), strict=True))
    return [q.select(0xF0F0F0F0, q.left(high, 4), low) for high, low in pairs] + [
        q.select(0xF0F0F0F0, high, q.right(low, 4)) for high, low in pairs
    ]


def _lut16(q: Program, planes: Sequence[str], table: Sequence[str]) -> list[str]:
    """table: the low bytes of all entries, four a register, then the high bytes."""
    outputs = []
    words = _nibbles(q, [None] * (4 - len(planes)) + list(planes) if len(planes) < 4 else [None, *planes[1:]])
    for j, word in enumerate(words):
        for half in (0, 16):
            selector = q.right(word, half)
            looked = [q.permute(*table[i : i + 2], selector) for i in range(0, len(table), 2)]
            if len(planes) == 4:
                # The top plane picks between two tables of eight, byte by byte.
                top = q.right(q.mask(q.right(planes[0], j), 0x11111111), half)
                mask = q.permute(_hex(0xFF00), _hex(0), top)
                looked = [q.emit("lop3.b32", mask, looked[i + 1], looked[i], tail=f", {_hex(_SELECT)}") for i in (0, 2)]
            low, high = looked
            outputs += [q.permute(low, high, "0x6240"), q.permute(low, high, "0x7351")]
    return outputs


def _lut16_gather(q: Program, planes: Sequence[str], table: Sequence[str], bf16: bool) -> list[str]:
    """table: the 64-bit address of the row's fp16 entries, too many for registers: one cached load per weight."""
    words = _bytes(q, planes)
    outputs = []
    for j, half, pair in _order():
        loaded = []
        for i in (2 * half, 2 * half + 1):
            code = q.permute(words[j + 4 * pair], "0x0", f"0x{0x4440 + i:04x}")
            address = q.emit("mad.wide.u32", code, 2, table[0], kind="b64")
            loaded.append(q.emit("ld.global.nc.u16", f"[{address}]"))
        outputs.append(_rounded_pair(q, *loaded) if bf16 else q.permute(*loaded, "0x5410"))
    return outputs


def _lut8(q: Program, planes: Sequence[str], table: Sequence[str], bf16: bool) -> list[str]:
    """table: the bytes of all entries, four a register. Values are `number_bias` + byte."""
    magic, bias = _magic(bf16)
    outputs = []
    for word in _nibbles(q, [None] * (4 - len(planes)) + list(planes)):
        for half in (0, 16):
            looked = q.permute(table[0], table[1], q.right(word, half))
            if len(planes) == 4:
                # prmt answers the sign of the byte where the selector's top bit is set: 0, since bytes are below 128.
                flipped = q.right(q.emit("xor.b32", word, _hex(0x88888888)), half)
                looked = q.emit("add.u32", looked, q.permute(table[2], table[3], flipped))
            for order in ("0x4240", "0x4341"):
                number = q.permute(looked, magic, order)
                outputs.append(_add(q, number, -(bias + 64), bf16) if len(planes) < 4 else number)
    return outputs


def _affine(q: Program, planes: Sequence[str], bf16: bool) -> list[str]:
    """Values are `number_bias` + code, of code - 128 at 8 bits."""
    narrow = bf16 and len(planes) == 8  # bf16 holds the code, but not the code and a bias
    magic, bias = _magic(bf16 and not narrow)
    words = _bytes(q, planes)
    outputs = []
    for j, half, pair in _order():
        number = q.permute(words[j + 4 * pair], magic, "0x4140" if half == 0 else "0x4342")
        if narrow:
            number = _to_bf16(q, _add(q, number, -(bias + 128), False))
        outputs.append(number)
    return outputs


def number_bias(bits: int, codebook: str, bf16: bool) -> int:
    """What operands of lut8 and affine have beyond the byte of `tables.byte_line`.

    -64 makes them values, at an addition a weight. At 4 bits, where weights cost most, the row's sum is corrected.
    """
    if codebook == "lut8" and bits < 4:
        return -64
    if codebook == "affine" and bits == 8:
        return 0 if bf16 else 1024 + 128
    return 128 if bf16 else 1024


def _cubic(q: Program, planes: Sequence[str], coefficients: Sequence[str], bf16: bool) -> list[str]:
    """coefficients, as pairs of fp16, highest power first, of (code - 2^(b-1)) / 2^(b-1)."""
    middle = 1 << (len(planes) - 1)
    magic, bias = _magic(False)
    words = _bytes(q, planes)
    outputs = []
    for j, half, pair in _order():
        number = q.permute(words[j + 4 * pair], magic, "0x4140" if half == 0 else "0x4342")
        u = _fma(q, number, _pair(1.0 / middle, False), _pair(-(bias + middle) / middle, False), False)
        value = coefficients[0]
        for coefficient in coefficients[1:]:
            value = _fma(q, value, u, coefficient, False)
        outputs.append(_to_bf16(q, value) if bf16 else value)
    return outputs


def _order() -> list[tuple[int, int, int]]:
    """(nibble word, half, pair) of the 16 outputs of a word, in output order."""
    return [(j, half, pair) for j in range(4) for half in (0, 1) for pair in (0, 1)]


def _magic(bf16: bool) -> tuple[str, int]:
    """The high byte that makes a code in the low byte a 16-bit float, and what it adds to the code."""
    return (_hex(0x43434343), 128) if bf16 else (_hex(0x64646464), 1024)


def _fma(q: Program, a: str, b: str, c: str, bf16: bool) -> str:
    b, c = (q.emit("mov.b32", operand) if operand.startswith("0x") else operand for operand in (b, c))
    return q.emit("fma.rn.bf16x2" if bf16 else "fma.rn.f16x2", a, b, c)


def _add(q: Program, a: str, constant: float, bf16: bool) -> str:
    return _fma(q, a, _pair(1.0, bf16), _pair(constant, bf16), bf16)


def _to_bf16(q: Program, pair: str) -> str:
    return _rounded_pair(q, pair, q.right(pair, 16))


def _rounded_pair(q: Program, first: str, second: str) -> str:
    """The fp16 in the low halves of two words, as bf16 in one."""
    low, high = (q.emit("cvt.f32.f16", q.emit("cvt.u16.u32", word, kind="b16"), kind="f32") for word in (first, second))
    return q.emit("cvt.rn.bf16x2.f32", high, low)


def table_registers(bits: int, codebook: str) -> int:
    """Table operands that `tables.table_operands` makes of a row."""
    if codebook == "lut16":
        return {2: 4, 3: 4, 4: 8}.get(bits, 1)
    if codebook == "lut8":
        return {2: 2, 3: 2, 4: 4}[bits]
    return {"affine": 0, "cubic": 4}[codebook]


def decoder_program(bits: int, codebook: str, bf16: bool) -> tuple[str, str]:
    """(PTX, constraints) for `inline_asm_elementwise` with pack 2: planes, then the row's table operands."""
    q = Program()
    registers = table_registers(bits, codebook)
    first = _OUTPUTS + 2 * bits
    table = [f"${first + 2 * i}" for i in range(registers)]
    outputs = []
    for word in (0, 1):
        planes = [f"${_OUTPUTS + 2 * plane + word}" for plane in range(bits)]
        if codebook == "lut16":
            outputs += _lut16(q, planes, table) if bits <= 4 else _lut16_gather(q, planes, table, bf16)
        elif codebook == "lut8":
            outputs += _lut8(q, planes, table, bf16)
        elif codebook == "affine":
            outputs += _affine(q, planes, bf16)
        else:
            outputs += _cubic(q, planes, table, bf16)
    kind = "l" if codebook == "lut16" and bits > 4 else "r"
    return q.text(outputs), ",".join(["=r"] * _OUTPUTS + ["r"] * (2 * bits) + [kind] * (2 * registers))


def float_pair_program(bf16: bool) -> str:
    """PTX that turns two fp16 in a word into the two values of the operand's dtype."""
    q = Program()
    return q.text([_to_bf16(q, "$1") if bf16 else "$1"])


# Low and high bytes of the four 16-bit values in two words.
LOW_BYTES = "prmt.b32 $0, $1, $2, 0x6420;"
HIGH_BYTES = "prmt.b32 $0, $1, $2, 0x7531;"
