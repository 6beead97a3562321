"""The kernel that moves codes, against its twin: the same codes, but where two cost the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pagedweight.quant import descent_kernel
from pagedweight.quant.descent import Sweep, move_columns_reference
from pagedweight.quant.descent_kernel import launch_move_columns
from tests.quant.test_refine import correlated_moment

WIDTHS, PARENT = (2, 3, 5), 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there, through the interpreter


def sweep(experts: int, rows: int, columns: int, moments: int) -> Sweep:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts, rows, columns, generator=generator)
    codes = torch.randint(0, 1 << PARENT, (experts, rows, columns), generator=generator, dtype=torch.uint8)
    tables = [torch.randn(experts, rows, 1 << bits, generator=generator).sort(-1).values for bits in WIDTHS]
    parent = torch.arange(1 << PARENT)
    values = torch.stack([t[..., parent >> (PARENT - bits)] for t, bits in zip(tables, WIDTHS, strict=True)])
    given = values.gather(-1, codes.long().expand(len(WIDTHS), -1, -1, -1))
    worth = torch.rand(len(WIDTHS), experts, 1, 1, generator=generator) + 0.5
    parts = (weight, correlated_moment(columns, moments), values, worth, codes, weight - given)
    return Sweep(*(part.to(DEVICE).contiguous() for part in parts))


def loss(one: Sweep) -> torch.Tensor:
    """sum_b worth_b tr(D_b H D_b^T)."""
    return (one.worth * ((one.errors @ one.moment) * one.errors)).sum(dtype=torch.float64)


@pytest.mark.parametrize("moments", [1, 2])
@pytest.mark.parametrize("columns", [4, 35])
def test_the_kernel_moves_codes_as_its_twin_does(columns: int, moments: int) -> None:
    moved, wanted = (sweep(2, 2, columns, moments) for _ in range(2))
    before = loss(moved)
    for first in range(0, columns, 32):
        last = min(first + 32, columns)
        launch_move_columns(*moved, moved.errors @ moved.moment[:, :, first:last], first)
        move_columns_reference(wanted, wanted.errors @ wanted.moment[:, :, first:last], first)
    assert loss(moved) < 0.8 * before
    assert (moved.codes == wanted.codes).float().mean() > 0.98
    torch.testing.assert_close(loss(moved), loss(wanted), rtol=1e-3, atol=0)
    given = moved.values.gather(-1, moved.codes.long().expand(len(WIDTHS), -1, -1, -1))
    torch.testing.assert_close(moved.errors, moved.weight - given)


def test_the_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one, which is another where a model lies on the second GPU."""
    current, launched_on = [None], []

    @contextmanager
    def device(wanted: str) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(descent_kernel, "launch_move_columns", lambda *_: launched_on.append(current[-1]))
    elsewhere = SimpleNamespace(is_cuda=True, device="cuda:1")
    sweep(1, 2, 4, 1)._replace(weight=elsewhere).move(0, 4)
    assert launched_on == ["cuda:1"]
