"""16-bit tables in shared memory, laid out as `assembly_spread` says: a warp's look-ups meet no bank twice."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import assembly_spread, ptx, tables

_COPIED = tl.constexpr(assembly_spread.COPIED)
_STRIDE = tl.constexpr(assembly_spread.STRIDE)


@triton.jit
def copied(address, row, room, BITS: tl.constexpr, BF16: tl.constexpr):
    """Copies the tables of the lut16 rows (R,) from `address` to the shared memory at `room`, in the operand's dtype.

    Returns what `ptx.decode_words` takes: (R, 1) int32, where this lane finds each row's entries.
    """
    ROWS: tl.constexpr = row.shape[0]
    GROUP: tl.constexpr = _STRIDE * 2**BITS  # bytes of sixteen rows
    low, high = tl.split(tl.permute(tl.reshape(row, (ROWS // 16, 2, 8)), (0, 2, 1)))
    pair = tl.arange(0, ROWS // 2)[None, :]
    part = tl.arange(0, 2**BITS // _COPIED)[:, None]
    ptx.copy_entries(
        _entries(address, tl.reshape(low, (1, ROWS // 2)), part, BITS),
        _entries(address, tl.reshape(high, (1, ROWS // 2)), part, BITS),
        room + pair // 8 * GROUP + pair % 8 * 16 + part * (_COPIED * _STRIDE),
        BF16,
    )
    tl.debug_barrier()
    index = tl.arange(0, ROWS)[:, None]
    first = ptx.lane_words(room) + index // 16 * GROUP + index % 8 * 16 + index // 8 % 2 * 2
    return (tables.as_loaded(first, address, row[:, None] < 0),)


@triton.jit
def _entries(address, row, part, BITS: tl.constexpr):
    """Addresses of a part of each row's table."""
    return address + row.to(tl.int64) * (2 * 2**BITS) + part * (2 * _COPIED)
