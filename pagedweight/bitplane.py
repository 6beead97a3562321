"""Nested codes as bit-planes, and the values that a code stands for under each codebook.

The b-bit code of a weight is the top b bits of its P-bit parent code, so the first b planes are the b-bit code.
docs/format.md describes the same in words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedweight.layout import CODEBOOKS, MAX_WIDTH, PackedBlock, table_form

WORD_BITS = 32
LUT8_ZERO = 64  # lut8 bytes are 0..127 around this, so that two of them add within a byte


def plane_words(columns: int) -> int:
    """Number of 32-bit words that hold one row of one plane."""
    return -(-columns // WORD_BITS)


def pack_codes(codes: Tensor, planes: int) -> Tensor:
    """Planes of `planes`-bit codes, the most significant bit first; bits beyond the last column are zero.

    codes: (..., N, K) uint8. Returns (..., P, N, ceil(K / 32)) int32 that holds uint32 words; bit j of word w is
    column 32 w + j. ValueError when codes are not uint8, are empty, or do not fit in `planes` bits.
    """
    if codes.dtype != torch.uint8 or codes.ndim < 2 or codes.numel() == 0:
        raise ValueError(
            f"codes are {codes.dtype} of shape {tuple(codes.shape)}; give uint8 of (..., N, K) with N, K >= 1"
        )
    if not 1 <= planes <= MAX_WIDTH:
        raise ValueError(f"planes is {planes}; give 1 to {MAX_WIDTH}")
    if planes < MAX_WIDTH and int(codes.max()) >> planes:
        raise ValueError(f"the largest code is {int(codes.max())}; {planes} planes hold codes below {1 << planes}")
    padding = plane_words(codes.shape[-1]) * WORD_BITS - codes.shape[-1]
    octets = torch.nn.functional.pad(codes, (0, padding)).unflatten(-1, (-1, 8)).unsqueeze(-4)
    shifts = torch.arange(planes - 1, -1, -1, dtype=torch.uint8, device=codes.device).view(-1, 1, 1, 1)
    bits = (octets >> shifts) & 1
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (bits * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack_codes(planes: Tensor, columns: int, bits: int) -> Tensor:
    """The `bits`-bit codes, (..., N, K) uint8, read from the first `bits` planes alone.

    planes: (..., P, N, ceil(K / 32)) int32 as `pack_codes` makes them; bits beyond K may be anything.
    """
    if not 1 <= bits <= planes.shape[-3]:
        raise ValueError(f"bits is {bits}; these {planes.shape[-3]} planes hold codes of 1 to {planes.shape[-3]} bits")
    if not 1 <= columns <= planes.shape[-1] * WORD_BITS or plane_words(columns) != planes.shape[-1]:
        raise ValueError(f"columns is {columns}; {planes.shape[-1]} words per row hold another number of columns")
    octets = planes[..., :bits, :, :].contiguous().view(torch.uint8).unsqueeze(-1)
    positions = torch.arange(8, dtype=torch.uint8, device=planes.device)
    rows = ((octets >> positions) & 1).flatten(-2)[..., :columns]
    codes = torch.zeros_like(rows[..., 0, :, :])
    for plane in range(bits):
        codes = (codes << 1) | rows[..., plane, :, :]
    return codes


def codebook_of(table: Tensor, bits: int) -> str:
    """The codebook that a width's table belongs to, told by its dtype and shape (see `table_values`)."""
    form = (table.dtype, table.shape[-1])
    kind = next((codebook for codebook in CODEBOOKS if table_form(codebook, bits) == form), None)
    if kind is None:
        raise ValueError(
            f"a {bits}-bit table is {table.dtype} of shape {tuple(table.shape)}; no codebook looks like that"
        )
    return kind


def table_values(table: Tensor, bits: int) -> Tensor:
    """The value of every code, (..., N, 2^bits) fp32.

    table: one of
      lut16   (..., N, 2^b) fp16, entry c the value of code c;
      lut8    (..., N, 2^b + 4) uint8, bytes 0..127 and then the row scale (little-endian fp32): scale (byte[c] - 64);
      cubic   (..., N, 4) fp16, c3 c2 c1 c0: ((c3 v + c2) v + c1) v + c0 at v = (c - 2^(b-1)) / 2^(b-1);
      affine  (..., N, 2) fp32, scale and offset: scale (c + 1/2 - 2^(b-1)) + offset.
    """
    kind = codebook_of(table, bits)
    if kind == "lut16":
        return table.float()
    if kind == "lut8":
        scale = table[..., -4:].contiguous().view(torch.float32)
        return scale * (table[..., :-4].float() - LUT8_ZERO)
    half = 1 << (bits - 1)
    codes = torch.arange(1 << bits, dtype=torch.float32, device=table.device)
    if kind == "affine":
        return table[..., :1] * (codes + 0.5 - half) + table[..., 1:]
    c3, c2, c1, c0 = table.float().split(1, dim=-1)
    v = (codes - half) / half
    return ((c3 * v + c2) * v + c1) * v + c0


def table_from_bytes(octets: Tensor, codebook: str, bits: int) -> Tensor:
    """The table (..., N, entries) that its bytes (..., N * entries * itemsize) uint8 hold, row after row."""
    dtype, entries = table_form(codebook, bits)
    return octets.view(dtype).unflatten(-1, (-1, entries))


def dequantize(packed: PackedBlock, bits: int) -> Tensor:
    """The (N, K) fp32 weights of a linear-block at `bits` bits; KeyError when it has no table of that width."""
    if bits not in packed.tables:
        raise KeyError(f"no table of {bits} bits; this linear-block has {sorted(packed.tables)}")
    codes = unpack_codes(packed.planes, packed.columns, bits)
    return table_values(packed.tables[bits], bits).gather(-1, codes.long())
