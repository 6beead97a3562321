import pytest
import torch
import triton
import triton.language as tl

from pagedweight.bitplane import table_values
from pagedweight.kernels.decode import tables
from pagedweight.kernels.prefill.assembly import table_registers
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
    tl.store(factor_ptr + row, tables.row_factor(address, row, BITS, CODEBOOK))


@pytest.mark.parametrize(("bits", "codebook"), [(2, "lut8"), (3, "lut8"), (4, "lut8"), (3, "affine"), (8, "affine")])
def test_operands_hold_what_the_decoders_take(bits, codebook):
    table = random_table(codebook, ROWS, bits, 0.3, torch.Generator().manual_seed(bits)).contiguous().to(DEVICE)
    registers = table_registers(bits, codebook)
    operands = torch.zeros(registers + 1, ROWS, dtype=torch.int32, device=DEVICE)
    factor = torch.empty(ROWS, device=DEVICE)
    address = torch.tensor([table.data_ptr()], device=DEVICE)
    _operands_kernel[(1,)](address, operands, factor, bits, codebook)
    assert not operands[registers].any()
    if codebook == "lut8":
        # Looked up by four bits: of two bits the table comes twice.
        octets = operands[:registers].T.contiguous().view(torch.uint8)[:, : 1 << bits]
        decoded = octets.float() - 64
    else:
        slope, ratio = (operand.view(torch.float16)[::2, None].float() for operand in operands[:2].clone())
        decoded = slope * (torch.arange(1 << bits, device=DEVICE) - (1 << (bits - 1))) + ratio
    assert_close(factor[:, None] * decoded, table_values(table.cpu(), bits).to(DEVICE).float(), torch.float16)
