"""Inline PTX of 16-bit tables in shared memory, where every look-up of a warp meets a bank of its own.

A warp holds eight rows of an operand in four lanes each, and in other registers the rows eight further. An entry of
row r and the same entry of row r + 8 are a word, which stands in the four banks of row r's lanes; one code's words go
once through the 32 banks, and the next code's follow. So 32 lanes look up at once, whatever their codes, and an address
is a byte of codes times the stride: one instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedweight.kernels.decode import assembly
from pagedweight.kernels.decode.assembly import Program

ROW_BYTES = {bits: 8 << bits for bits in (5, 6)}  # of a row's half of the words, by width
STRIDE = 128  # bytes from one code's words to the next
COPIED = 8  # entries of a row that one program of `copy_program` copies: two loads of 16 bytes, one of each row

# $1 and a word further for each lane of four.
LANE_WORDS = "mov.u32 $0, %laneid;\nand.b32 $0, $0, 3;\nmad.lo.u32 $0, $0, 4, $1;"


def decoder_program(bits: int) -> tuple[str, str]:
    """(PTX, constraints) as `assembly.decoder_program`; the table operand is where the row's words begin."""
    q = Program()
    outputs: list[str] = []
    for word in (0, 1):
        planes = [f"${assembly._OUTPUTS + 2 * plane + word}" for plane in range(bits)]
        outputs += _look_ups(q, planes, f"${assembly._OUTPUTS + 2 * bits}")
    return q.text(outputs), ",".join(["=r"] * assembly._OUTPUTS + ["r"] * (2 * bits + 2))


def _look_ups(q: Program, planes: Sequence[str], first: str) -> list[str]:
    words = assembly._bytes(q, planes)
    outputs = []
    for j, half, pair in assembly._order():
        loaded = []
        for i in (2 * half, 2 * half + 1):
            # Four products of bytes and their sum: the others' factors are zero.
            address = q.emit("dp4a.u32.u32", words[j + 4 * pair], f"0x{STRIDE << 8 * i:08x}", first)
            loaded.append(q.emit("ld.shared.u16", f"[{address}]"))
        outputs.append(q.permute(*loaded, "0x5410"))
    return outputs


def copy_program(bf16: bool) -> tuple[str, str]:
    """(PTX, constraints), pack 1: copies COPIED fp16 entries of two rows, at $1 and $2, to words from $3 on."""
    q = Program()
    rows = (("low", 1), ("high", 2))
    loads = [f"ld.global.nc.v4.b32 {{{row}0, {row}1, {row}2, {row}3}}, [${i}];" for row, i in rows]
    for i in range(COPIED // 2):
        low, high = (assembly._to_bf16(q, f"{row}{i}") if bf16 else f"{row}{i}" for row, _ in rows)
        for half, order in enumerate(("0x5410", "0x7632")):
            word = q.permute(low, high, order)
            q.lines.append(f"st.shared.v4.b32 [$3 + {(2 * i + half) * STRIDE}], {{{', '.join([word] * 4)}}};")
    q.lines[:0] = [".reg .b32 low<4>, high<4>;", *loads]
    return q.text(["0"]), "=r,l,l,r"


def room_program(size: int) -> str:
    """PTX that reserves shared memory besides the compiler's and gives its address."""
    return f"{{\n.shared .align 16 .b8 entries[{size}];\nmov.u32 $0, entries;\n}}"
