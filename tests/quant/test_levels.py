"""Levels: each lowers the loss of the one before, in groups that change nothing, and within the device's bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedweight.bitplane import dequantize
from pagedweight.layout import PackedBlock
from pagedweight.quant import levels
from pagedweight.quant.levels import LEVELS, Settings, check_level, quantize_experts
from tests.quant.test_refine import correlated_moment, losses

WIDTHS = (2, 3, 4, 6)


class Planted:
    """Stakes with a moment of each expert's own."""

    def __init__(self, experts: int, columns: int, correlated: bool = True, device: str = "cpu") -> None:
        self.moments = correlated_moment(columns, experts).to(device)
        self.correlated = correlated

    def weights(self) -> Tensor:
        return self.moments.diagonal(dim1=1, dim2=2)[:, None, :]

    def second_moment(self, expert: int) -> Tensor:
        assert self.correlated, "a moment that says nothing is not made"
        return self.moments[expert]


def made(weight: Tensor, level: str, stakes: Planted | None) -> list[PackedBlock]:
    return list(quantize_experts(weight, Settings(level, WIDTHS, dict.fromkeys(WIDTHS, "lut16")), stakes))


def same(left: PackedBlock, right: PackedBlock) -> bool:
    tables = all(torch.equal(left.tables[bits], right.tables[bits]) for bits in WIDTHS)
    return tables and torch.equal(left.planes, right.planes)


def test_each_level_beats_the_one_before() -> None:
    weight, stakes = torch.randn(2, 24, 96, generator=torch.Generator().manual_seed(0)), Planted(2, 96)
    loss = {level: losses(weight, made(weight, level, stakes), stakes.moments) for level in LEVELS}
    plain = losses(weight, made(weight, "fast", None), stakes.moments)
    assert (loss["fast"][:2] < plain[:2]).all()  # higher widths are splits of these
    assert (loss["balanced"] < loss["fast"]).all()
    assert (loss["best"][:3] < loss["balanced"][:3]).all()
    assert (loss["best"] < loss["fast"]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_groups_and_row_chunks_change_nothing(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stakes = torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(0)), Planted(5, 40)
    together = made(weight, level, stakes)
    monkeypatch.setattr(levels, "GROUP_BYTES", {"cpu": 2 * 4 * (24 * 40 + 40 * 40)})
    assert len(list(levels._groups(weight, True))) == 3
    assert all(same(one, other) for one, other in zip(together, made(weight, level, stakes), strict=True))


def test_without_correlations_no_moment_is_made() -> None:
    weight, stakes = torch.randn(2, 8, 40), Planted(2, 40, correlated=False)
    assert all(same(a, b) for a, b in zip(made(weight, "best", stakes), made(weight, "fast", stakes), strict=True))


def test_levels_are_checked() -> None:
    check_level("fast", calibrated=False)
    check_level("best", calibrated=True)
    with pytest.raises(ValueError, match="the levels are fast, balanced, best"):
        check_level("better", calibrated=True)
    with pytest.raises(ValueError, match="level 'best' weighs errors by calibration"):
        check_level("best", calibrated=False)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_a_gpu_loses_as_little_as_the_cpu(level: str) -> None:
    weight, stakes = torch.randn(3, 200, 320, generator=torch.Generator().manual_seed(0)), Planted(3, 320)
    on_cpu = losses(weight, made(weight, level, stakes), stakes.moments)
    device, moments = weight.cuda(), Planted(3, 320, device="cuda")
    packed, again = made(device, level, moments), made(device, level, moments)
    assert all(same(one, other) for one, other in zip(packed, again, strict=True))
    on_gpu = losses(device, packed, moments.moments).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0.02, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_the_device_holds_at_most_three_times_the_weights(level: str) -> None:
    """One projection of a layer of Qwen1.5-MoE's size; the moments belong to calibration and count too."""
    weight = torch.randn(60, 1408, 2048, device="cuda", dtype=torch.bfloat16)
    stakes = Planted(1, 2048, device="cuda")
    stakes.moments = stakes.moments.expand(60, -1, -1)
    layer_bytes = 2 * 60 * 3 * 1408 * 2048
    torch.cuda.reset_peak_memory_stats()
    for packed in quantize_experts(
        weight[:4] if level == "best" else weight, Settings(level, WIDTHS, dict.fromkeys(WIDTHS, "lut16")), stakes
    ):
        assert dequantize(packed, 2).isfinite().all()
    assert torch.cuda.max_memory_allocated() <= 3 * layer_bytes, torch.cuda.max_memory_allocated() / layer_bytes
