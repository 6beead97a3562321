"""Fits of the four codebooks: least squares on fixed codes, finite always, refused where they cannot serve."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.bitplane import codebook_of, dequantize, table_values
from pagedweight.layout import check_codebook
from pagedweight.quant.codebooks import fit_table
from pagedweight.quant.model import quantize_block, sensitivity


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


SERVED = [(codebook, bits) for codebook, widths in
          {"lut16": range(2, 9), "lut8": range(2, 5), "cubic": range(3, 9), "affine": range(2, 9)}.items()
          for bits in widths]  # fmt: skip


def loss(table: torch.Tensor, weights: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    bits = weights.shape[-1].bit_length() - 1
    return (weights * (means - table_values(table, bits)).square()).sum(-1)


@pytest.mark.parametrize(("codebook", "bits"), SERVED)
def test_a_fit_tells_its_codebook_and_small_changes_do_not_improve_it(codebook: str, bits: int) -> None:
    means = torch.randn(5, 1 << bits, dtype=torch.float64).sort(dim=1).values
    weights = torch.rand(5, 1 << bits, dtype=torch.float64) + 0.1
    table = fit_table(codebook, weights, means)
    assert codebook_of(table, bits) == codebook
    best = loss(table, weights, means)
    if codebook in ("cubic", "affine"):
        for column in range(table.shape[-1]):
            for step in (-0.05, 0.05):
                moved = table.clone()
                moved[:, column] += step
                assert (loss(moved, weights, means) > best).all()
    if codebook == "lut8":
        assert (table[:, :-4] <= 127).all()
        for factor in (0.98, 1.02):
            moved = torch.cat(
                [table[:, :-4], (table[:, -4:].contiguous().view(torch.float32) * factor).view(torch.uint8)], 1
            )
            assert (loss(moved, weights, means) >= best).all()


@given(st.integers(0, 2**31))
def test_values_that_lie_on_a_codebook_are_fitted_exactly(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(4, 32, generator=generator, dtype=torch.float64) + 0.1
    affine = torch.randn(4, 2, generator=generator)
    torch.testing.assert_close(
        table_values(fit_table("affine", weights, table_values(affine, 5).double()), 5), table_values(affine, 5)
    )
    cubic = torch.randn(4, 4, generator=generator).half()
    torch.testing.assert_close(
        table_values(fit_table("cubic", weights, table_values(cubic, 5).double()), 5),
        table_values(cubic, 5),
        rtol=2e-3,
        atol=2e-3,
    )


@pytest.mark.parametrize(
    ("codebook", "bits"),
    [("lut16", 2), ("lut16", 8), ("lut8", 4), ("cubic", 3), ("cubic", 8), ("affine", 2), ("affine", 6)],
)
@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(2, 44),
        torch.full((2, 44), 1e30),
        torch.tensor([[65504.0, -65504.0] + [1e-3] * 42]),
        torch.tensor([[-2.5]]),
        torch.full((3, 7), 1e-30),
    ],
    ids=["zeros", "beyond-fp16", "both-ends", "one-weight", "below-fp16"],
)
def test_every_codebook_is_finite_on_rows_that_hurt(codebook: str, bits: int, weight: torch.Tensor) -> None:
    packed = quantize_block(weight, (bits,), codebooks={bits: codebook})
    values = dequantize(packed, bits)
    assert values.isfinite().all()
    assert values.abs().max() <= 4 * 65504
    if weight.unique().numel() == 1:
        torch.testing.assert_close(values, weight.clamp(-65504, 65504), rtol=1e-3, atol=1e-7)


def test_byte_tables_lose_next_to_nothing_on_the_same_codes() -> None:
    weight = torch.randn(6, 150)
    packed = quantize_block(weight, (2, 3, 4), codebooks={2: "lut8", 3: "lut8", 4: "lut8"})
    plain = quantize_block(weight, (2, 3, 4))
    assert torch.equal(packed.planes, plain.planes)
    ratio = sensitivity(weight, packed) / sensitivity(weight, plain)
    assert (ratio < 1.05).all()
    assert (ratio >= 1 - 1e-3).all()  # lut16 is the least-squares table of these codes


def test_codebooks_are_chosen_width_by_width() -> None:
    weight = torch.randn(3, 150)
    mixed = {2: "lut8", 3: "lut8", 4: "lut16", 5: "cubic", 6: "affine"}
    packed = quantize_block(weight, tuple(mixed), codebooks=mixed)
    assert {bits: codebook_of(table, bits) for bits, table in packed.tables.items()} == mixed
    assert (sensitivity(weight, packed).diff() < 0).all()


@pytest.mark.parametrize(
    ("codebook", "limits"), [("cubic", (1.05, 1.1, 1.1, 1.3, 1.8)), ("affine", (1.3, 1.3, 1.4, 2.3, 6))]
)
def test_codes_are_fitted_to_a_codebook_that_is_a_formula(codebook: str, limits: tuple[float, ...]) -> None:
    """Loss over lut16's at 2 to 6 bits; on codes made for free means it would be 9 (cubic) and 40 at 6 bits."""
    weight, widths = torch.randn(20, 1000), (2, 3, 4, 5, 6)
    packed = quantize_block(weight, widths, codebooks={5: codebook, 6: codebook})
    ratio = sensitivity(weight, packed) / sensitivity(weight, quantize_block(weight, widths))
    assert (ratio < torch.tensor(limits)).all(), ratio


def test_widths_above_a_formula_split_its_codes() -> None:
    weight = torch.randn(8, 300)
    alone = quantize_block(weight, (3, 5), codebooks={5: "cubic"})
    packed = quantize_block(weight, (3, 5, 6, 8), codebooks={5: "cubic"})
    assert torch.equal(packed.planes[:5], alone.planes)
    assert torch.equal(packed.tables[5], alone.tables[5])
    assert (sensitivity(weight, packed).diff() < 0).all()


@pytest.mark.parametrize(("codebook", "bits"), [("lut8", 5), ("cubic", 2), ("lut4", 3)])
def test_a_codebook_that_cannot_serve_a_width_is_refused(codebook: str, bits: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits"):
        check_codebook(codebook, bits)
    with pytest.raises(ValueError, match=f"{bits} bits"):
        quantize_block(torch.randn(2, 8), (bits,), codebooks={bits: codebook})
