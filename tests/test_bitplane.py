"""Bit-planes: packing is invertible, lower widths are prefixes, and the documented layout is the real one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.bitplane import codebook_of, dequantize, pack_codes, table_values, unpack_codes
from pagedweight.layout import PackedBlock


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@st.composite
def parent_codes(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Codes (N, K) and their width P; K crosses one and two words."""
    rows, columns, planes = draw(st.integers(1, 9)), draw(st.integers(1, 70)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randint(0, 1 << planes, (rows, columns), dtype=torch.uint8, generator=generator), planes


def lookup_one_by_one(packed: PackedBlock, bits: int) -> list[list[float]]:
    """docs/format.md transcribed: one weight at a time, no help from the package."""
    planes = packed.planes.tolist()
    table = packed.tables[bits].tolist()
    weights = []
    for row in range(packed.planes.shape[1]):
        weights.append([])
        for column in range(packed.columns):
            code = 0
            for plane in range(bits):
                word = planes[plane][row][column // 32] % 2**32
                code = 2 * code + word // 2 ** (column % 32) % 2
            weights[row].append(table[row][code])
    return weights


@given(parent_codes())
def test_unpacking_gives_back_what_was_packed(case: tuple[torch.Tensor, int]) -> None:
    codes, planes = case
    packed = pack_codes(codes, planes)
    assert packed.dtype == torch.int32
    assert packed.shape == (planes, codes.shape[0], -(-codes.shape[1] // 32))
    assert torch.equal(unpack_codes(packed, codes.shape[1], planes), codes)


@given(parent_codes(), st.data())
def test_a_lower_width_is_the_prefix_of_the_parent_code(case: tuple[torch.Tensor, int], data: st.DataObject) -> None:
    codes, planes = case
    bits = data.draw(st.integers(1, planes))
    packed = pack_codes(codes, planes)
    packed[bits:] = 0x5A5A5A5A  # planes above the width must not be read
    assert torch.equal(unpack_codes(packed, codes.shape[1], bits), codes >> (planes - bits))


@given(parent_codes())
def test_padding_bits_are_written_as_zero_and_never_read(case: tuple[torch.Tensor, int]) -> None:
    codes, planes = case
    packed = pack_codes(codes, planes)
    full = unpack_codes(packed, packed.shape[-1] * 32, planes)
    assert not full[:, codes.shape[1] :].any()
    padding = pack_codes(torch.ones_like(full), 1)
    padding &= ~pack_codes(torch.nn.functional.pad(torch.ones_like(codes), (0, full.shape[1] - codes.shape[1])), 1)
    assert torch.equal(unpack_codes(packed | padding, codes.shape[1], planes), codes)


@given(parent_codes())
def test_dequantize_equals_a_plain_loop_over_the_documented_layout(case: tuple[torch.Tensor, int]) -> None:
    codes, planes = case
    tables = {b: torch.randn(codes.shape[0], 1 << b).half() for b in range(1, planes + 1)}
    packed = PackedBlock(pack_codes(codes, planes), tables, codes.shape[1])
    for bits in tables:
        assert dequantize(packed, bits).tolist() == lookup_one_by_one(packed, bits)


def test_a_stack_packs_as_its_members_do() -> None:
    codes = torch.randint(0, 64, (3, 5, 44), dtype=torch.uint8)
    stack = pack_codes(codes, 6)
    assert torch.equal(stack, torch.stack([pack_codes(member, 6) for member in codes]))
    assert torch.equal(unpack_codes(stack, 44, 4), codes >> 2)


def test_case_3_a_block_cut_for_two_ranks_dequantizes_to_the_uncut_one() -> None:
    """An N split takes the rows of planes and tables; a K split repacks its columns and keeps every table."""
    for rows, columns in ((192, 64), (64, 96)):
        codes = torch.randint(0, 64, (rows, columns), dtype=torch.uint8)
        tables = {bits: torch.randn(rows, 1 << bits).half() for bits in (2, 3, 4, 5, 6)}
        whole = PackedBlock(pack_codes(codes, 6), tables, columns)
        by_rows = [
            PackedBlock(whole.planes[:, part], {bits: table[part] for bits, table in tables.items()}, columns)
            for part in (slice(0, rows // 2), slice(rows // 2, rows))
        ]
        by_columns = [
            PackedBlock(pack_codes(unpack_codes(whole.planes, columns, 6)[:, part], 6), tables, columns // 2)
            for part in (slice(0, columns // 2), slice(columns // 2, columns))
        ]
        for bits in tables:
            assert torch.equal(torch.cat([dequantize(part, bits) for part in by_rows]), dequantize(whole, bits))
            assert torch.equal(torch.cat([dequantize(part, bits) for part in by_columns], 1), dequantize(whole, bits))


def test_each_codebook_is_its_formula() -> None:
    lut8 = torch.tensor([[0, 64, 65, 127]], dtype=torch.uint8)
    lut8 = torch.cat([lut8, torch.tensor([[0.5]]).view(torch.uint8)], dim=1)
    assert codebook_of(lut8, 2) == "lut8"
    assert table_values(lut8, 2).tolist() == [[-32.0, 0.0, 0.5, 31.5]]
    affine = torch.tensor([[0.5, 3.0], [0.0, -1.0]])
    assert codebook_of(affine, 3) == "affine"
    assert table_values(affine, 3)[0].tolist() == [3 + 0.5 * (c - 3.5) for c in range(8)]
    assert table_values(affine, 3)[1].tolist() == [-1.0] * 8
    cubic = torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=torch.float16)
    assert codebook_of(cubic, 5) == "cubic"
    positions = [(c - 16) / 16 for c in range(32)]
    assert table_values(cubic, 5)[0].tolist() == [4 * v**3 + 3 * v**2 + 2 * v + 1 for v in positions]
    assert codebook_of(torch.zeros(1, 4, dtype=torch.float16), 2) == "lut16"


def test_parents_on_an_even_grid_nest_in_the_affine_codebook() -> None:
    """The mean of two sibling codes is the value of their parent code at twice the scale and the same offset."""
    child = table_values(torch.tensor([[0.25, 0.125]]), 5)
    parent = table_values(torch.tensor([[0.5, 0.125]]), 4)
    assert torch.equal(child.view(1, 16, 2).mean(-1), parent)


@pytest.mark.parametrize(
    ("codes", "planes", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), 4, "give uint8"),
        (torch.zeros(0, 3, dtype=torch.uint8), 4, "N, K >= 1"),
        (torch.zeros(2, 3, dtype=torch.uint8), 9, "give 1 to 8"),
        (torch.full((2, 3), 16, dtype=torch.uint8), 4, "hold codes below 16"),
    ],
)
def test_bad_codes_are_refused(codes: torch.Tensor, planes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_codes(codes, planes)


def test_bad_widths_and_tables_are_refused() -> None:
    planes = pack_codes(torch.zeros(2, 33, dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="bits is 4"):
        unpack_codes(planes, 33, 4)
    with pytest.raises(ValueError, match="columns is 32"):
        unpack_codes(planes, 32, 3)
    with pytest.raises(KeyError, match="no table of 3 bits"):
        dequantize(PackedBlock(planes, {}, 33), 3)
    with pytest.raises(ValueError, match="no codebook looks like that"):
        table_values(torch.zeros(2, 5), 3)
