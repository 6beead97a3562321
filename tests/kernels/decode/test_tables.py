import pytest
import torch
import triton
import triton.language as tl

from pagedweight.kernels.decode import tables
from tests.support import DEVICE


@triton.jit
def _entries_kernel(table_ptr, out_ptr, ROWS: tl.constexpr, BITS: tl.constexpr):
    """out[r, c] = what the two bytes of entry c stand for."""
    row = tl.arange(0, ROWS)
    address = table_ptr.to(tl.int64)
    low, high = tables.lut16_words(address, row, BITS)
    factor, shift = tables.byte_line(address, row, BITS, "lut16")
    for entry in tl.static_range(2**BITS):
        place: tl.constexpr = 8 * (entry % 4)
        octets = ((low[entry // 4] >> place) & 255) + 128 * ((high[entry // 4] >> place) & 255)
        value = factor * tl.reshape(octets, (ROWS,)) + shift
        tl.store(out_ptr + row * 2**BITS + entry, value)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_two_bytes_hold_a_16_bit_table_to_14_bits_of_its_largest(bits):
    generator = torch.Generator().manual_seed(bits)
    table = torch.randn(16, 1 << bits, generator=generator) * torch.logspace(-6, 4, 16)[:, None]
    table[3] = 0.0
    table = table.half().to(DEVICE)
    out = torch.full(table.shape, float("nan"), device=DEVICE)
    _entries_kernel[(1,)](table, out, ROWS=16, BITS=bits)
    peak = table.float().abs().amax(1, keepdim=True)
    assert bool(((out - table.float()).abs() <= 0.502 * peak / 8000).all())
