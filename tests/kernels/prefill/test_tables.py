import pytest
import torch
import triton
import triton.language as tl

from pagedweight.bitplane import table_values
from pagedweight.kernels.decode import tables
from pagedweight.kernels.decode.assembly import table_registers
from tests.support import DEVICE, assert_close, random_table

ROWS = 16


@triton.jit
def _operands_kernel(address_ptr, out_ptr, factor_ptr, BITS: tl.constexpr, CODEBOOK: tl.constexpr):
    """One program. The operands of ROWS rows in fp16, (operand, row) int32, and what their sums are multiplied by."""
    row = tl.arange(0, 16)
    address = tl.load(address_ptr)
    operands = tables.table_operands(address, row, BITS, CODEBOOK, False)
    for i in tl.static_range(len(operands)):
        tl.store(out_ptr + 16 * i + row[:, None], operands[i])
    tl.store(factor_ptr + row, tables.byte_line(address, row, BITS, CODEBOOK)[0])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_operands_hold_what_the_decoders_take(bits):
    table = random_table("lut8", ROWS, bits, 0.3, torch.Generator().manual_seed(bits)).contiguous().to(DEVICE)
    registers = table_registers(bits, "lut8")
    operands = torch.zeros(registers + 1, ROWS, dtype=torch.int32, device=DEVICE)
    factor = torch.empty(ROWS, device=DEVICE)
    address = torch.tensor([table.data_ptr()], device=DEVICE)
    _operands_kernel[(1,)](address, operands, factor, bits, "lut8")
    assert not operands[registers].any()
    # Looked up by four bits: of two bits the table comes twice.
    octets = operands[:registers].T.contiguous().view(torch.uint8)[:, : 1 << bits]
    assert_close(
        factor[:, None] * (octets.float() - 64), table_values(table.cpu(), bits).to(DEVICE).float(), torch.float16
    )
