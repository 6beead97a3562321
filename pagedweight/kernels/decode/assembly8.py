"""Inline PTX: words of bit-planes to int8 tensor-core operands, in registers."""

from __future__ import annotations

from pagedweight.kernels.decode import assembly
from pagedweight.kernels.decode.assembly import Program


def selector_program(bits: int) -> tuple[str, str]:
    """(PTX, constraints), pack 1: planes to 8 words of four code nibbles; for 4 bits, 8 more with the top bit flipped.

    Word 2 j + h holds, in its low half, the codes at bits 4 (4 h + i) + j, i = 0..3.
    """
    q = Program()
    outputs = 16 if bits == 4 else 8
    planes = [f"${outputs + plane}" for plane in range(bits)]
    words = assembly._nibbles(q, [None] * (4 - bits) + planes)
    selectors = [q.right(word, shift) for word in words for shift in (0, 16)]
    if bits == 4:
        flipped = [q.emit("xor.b32", word, assembly._hex(0x88888888)) for word in words]
        selectors += [q.right(word, shift) for word in flipped for shift in (0, 16)]
    return q.text(selectors), ",".join(["=r"] * outputs + ["r"] * bits)


def byte_program(bits: int) -> tuple[str, str]:
    """(PTX, constraints), pack 1: planes to 8 words; byte i of word j is the code at bit 8 i + j."""
    q = Program()
    planes = [f"${8 + plane}" for plane in range(bits)]
    if bits == 8:  # code - 128, to fit int8
        planes[0] = q.emit("xor.b32", planes[0], assembly._hex(0xFFFFFFFF))
    return q.text(assembly._bytes(q, planes)), ",".join(["=r"] * 8 + ["r"] * bits)


def look_up_program(bits: int) -> tuple[str, str]:
    """(PTX, constraints), pack 4: the words of `selector_program` and 2 table words, 4 for 4 bits; output 4 s + i looks
    up selector s of word i.

    A look-up in the wrong half of a table of sixteen gives 0, so the halves' answers are added.
    """
    q = Program()
    words = 8 if bits < 4 else 16
    table = [f"${32 + 4 * (words + t)}" for t in range(2 if bits < 4 else 4)]
    outputs = []
    for s in range(8):
        for i in range(4):
            looked = q.permute(*table[:2], f"${32 + 4 * s + i}")
            if bits == 4:
                looked = q.emit("add.u32", looked, q.permute(*table[2:], f"${64 + 4 * s + i}"))
            outputs.append(looked)
    return q.text(outputs), ",".join(["=r"] * 32 + ["r"] * (4 * (words + len(table))))


def spread_program() -> tuple[str, str]:
    """(PTX, constraints), pack 4: 8 byte words; output 4 j + i is byte word j of word i."""
    return "\n".join(f"mov.b32 ${i}, ${32 + i};" for i in range(32)), ",".join(["=r"] * 32 + ["r"] * 32)
