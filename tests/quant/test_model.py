"""Quantized linear-blocks: nested, deterministic, finite on rows that hurt, and refused when they cannot be right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.bitplane import dequantize, unpack_codes
from pagedweight.layout import PackedBlock
from pagedweight.quant.model import quantize_block, quantize_stack, sensitivity


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


WIDTHS = (2, 3, 4, 5, 6)


def same_bytes(left: PackedBlock, right: PackedBlock) -> bool:
    return (
        torch.equal(left.planes, right.planes)
        and left.columns == right.columns
        and left.tables.keys() == right.tables.keys()
        and all(torch.equal(left.tables[bits], right.tables[bits]) for bits in left.tables)
    )


@given(st.integers(1, 9), st.integers(1, 90), st.sets(st.integers(2, 8), min_size=1), st.integers(0, 2**31))
def test_every_table_entry_is_the_weighted_mean_of_its_members(rows: int, columns: int, widths: set, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    importance = torch.rand(columns, generator=generator) + 0.1
    packed = quantize_block(weight, tuple(widths), importance=importance)
    assert packed.planes.shape == (max(widths), rows, -(-columns // 32))
    for bits in widths:
        codes = unpack_codes(packed.planes, columns, bits).long()
        table = packed.tables[bits]
        assert table.shape == (rows, 1 << bits)
        assert table.dtype == torch.float16
        assert table.isfinite().all()
        assert (table.diff(dim=1) >= 0).all()
        total = torch.zeros(rows, 1 << bits).scatter_add_(1, codes, importance.expand(rows, -1))
        mean = torch.zeros(rows, 1 << bits).scatter_add_(1, codes, importance * weight) / total
        torch.testing.assert_close(table.float()[total > 0], mean[total > 0], rtol=2e-3, atol=1e-5)


def test_more_bits_never_hurt_and_two_bits_still_help() -> None:
    weight = torch.randn(16, 200)
    errors = sensitivity(weight, quantize_block(weight, (2, 3, 4, 5, 6, 7, 8)))
    assert errors.dtype == torch.float64
    assert (errors.diff() < 0).all()
    assert errors[0] < 0.15 * weight.double().square().sum()
    assert errors[2] < 0.012 * weight.double().square().sum()  # optimal un-nested 4-bit codes of a Gaussian: 0.0095


def test_sensitivity_is_equation_2() -> None:
    weight, importance = torch.randn(3, 40), torch.rand(3, 40)
    packed = quantize_block(weight, (3, 4), importance=importance)
    for index, bits in enumerate((3, 4)):
        approximation = dequantize(packed, bits)
        by_hand = sum(
            float(importance[n, k]) * float(weight[n, k] - approximation[n, k]) ** 2
            for n in range(3)
            for k in range(40)
        )
        assert float(sensitivity(weight, packed, importance)[index]) == pytest.approx(by_hand, rel=1e-5)


def test_importance_lowers_the_loss_it_weighs() -> None:
    weight, importance = torch.randn(8, 128), torch.randn(128).exp().square()
    informed = sensitivity(weight, quantize_block(weight, WIDTHS, importance=importance), importance)
    blind = sensitivity(weight, quantize_block(weight, WIDTHS), importance)
    assert (informed < 0.9 * blind).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_type_gives_the_codes_of_its_values(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 50).to(dtype)
    assert same_bytes(quantize_block(weight, WIDTHS), quantize_block(weight.double(), WIDTHS))


def test_the_same_input_gives_the_same_bytes_alone_or_in_a_stack() -> None:
    weight = torch.randn(3, 7, 44)
    stack = quantize_stack(weight, WIDTHS, seed=1)
    for expert in range(3):
        assert same_bytes(stack[expert], quantize_block(weight[expert], WIDTHS, seed=2))


def test_case_4_narrow_and_single_rows_keep_their_shape() -> None:
    for rows in (1, 60):
        weight = torch.randn(rows, 64)
        packed = quantize_block(weight, WIDTHS)
        assert dequantize(packed, 6).shape == (rows, 64)
        torch.testing.assert_close(dequantize(packed, 6), weight.half().float())  # 64 values, 64 codes


@pytest.mark.parametrize("widths", [(1,), (9,), (), (0, 3)])
def test_case_13_widths_that_cannot_be_served_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each from 2 to 8"):
        quantize_block(torch.randn(2, 8), widths)


def test_case_13_widths_are_sorted_and_made_unique() -> None:
    weight = torch.randn(2, 40)
    assert same_bytes(quantize_block(weight, (5, 3, 5)), quantize_block(weight, (3, 5)))
    assert sorted(quantize_block(weight, (4, 4)).tables) == [4]
    assert quantize_block(weight, (2, 3, 4)).planes.shape[0] == 4


def test_case_15_changing_one_expert_leaves_the_others_bytes_alone() -> None:
    weight = torch.randn(3, 5, 44)
    before = quantize_stack(weight, WIDTHS)
    weight[1] *= -2
    after = quantize_stack(weight, WIDTHS)
    assert same_bytes(before[0], after[0])
    assert same_bytes(before[2], after[2])
    assert not same_bytes(before[1], after[1])


@pytest.mark.parametrize(
    "weight",
    [
        torch.tensor([[0.25, -1.5]]).repeat(3, 22),  # two distinct values
        torch.zeros(3, 44),
        torch.full((3, 44), -0.3).half().float(),
        torch.randn(3, 44).half().float(),  # 256 codes for 44 weights
        torch.randn(5, 1).half().float(),
    ],
    ids=["two-values", "zeros", "constant", "more-codes-than-weights", "one-column"],
)
def test_case_27_rows_with_few_distinct_values_are_exact(weight: torch.Tensor) -> None:
    packed = quantize_block(weight, (2, 3, 4, 5, 6, 7, 8))
    for bits, table in packed.tables.items():
        assert table.isfinite().all()
        assert (table.diff(dim=1) >= 0).all()
        for row in range(weight.shape[0]):
            if weight[row].unique().numel() <= 1 << bits:
                assert torch.equal(dequantize(packed, bits)[row], weight[row])


def test_huge_values_saturate_and_leave_the_rest_of_the_row_right() -> None:
    weight = torch.randn(2, 60)
    weight[0, 3], weight[0, 7], weight[1, 5] = 1e38, -1e30, 70000.0
    packed = quantize_block(weight, (2, 4, 6))
    assert all(table.isfinite().all() for table in packed.tables.values())
    best = dequantize(packed, 6)
    assert best[0, 3] == 65504
    assert best[0, 7] == -65504
    torch.testing.assert_close(best[0, 8:], weight[0, 8:], rtol=1e-3, atol=1e-3)


def test_zero_importance_counts_as_equal_importance_and_unimportant_weights_stay_near() -> None:
    weight = torch.randn(2, 90)
    assert same_bytes(quantize_block(weight, WIDTHS, importance=torch.zeros(90)), quantize_block(weight, WIDTHS))
    importance = torch.ones(90)
    importance[10:] = 0
    approximation = dequantize(quantize_block(weight, WIDTHS, importance=importance), 6)
    assert ((approximation - weight).square().mean() < 0.05 * weight.square().mean()).item()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(poison: float) -> None:
    weight = torch.randn(3, 4, 8)
    weight[2, 1, 5] = poison
    with pytest.raises(ValueError, match=r"layers\.3\.experts\.2\.down holds NaN or infinite weights"):
        quantize_stack(weight, WIDTHS, names=[f"layers.3.experts.{e}.down" for e in range(3)])
    with pytest.raises(ValueError, match="expert 2 holds NaN"):
        quantize_stack(weight, WIDTHS)


def test_importance_that_is_negative_or_not_finite_is_refused() -> None:
    for poison in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the importance of expert 0 holds"):
            quantize_stack(torch.randn(1, 4, 8), WIDTHS, importance=torch.full((8,), poison))


def test_shapes_that_are_no_linear_block_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a stack is \(E, N, K\)"):
        quantize_stack(torch.randn(4, 8), WIDTHS)
    with pytest.raises(ValueError, match="a linear-block is"):
        quantize_block(torch.randn(2, 4, 8), WIDTHS)
