import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.kernels.prefill.prepare import launch_prepare, operand_columns
from pagedweight.kernels.routing import launch_group
from tests.support import DEVICE, assert_close


def place_of(column: int, columns: int) -> int:
    """Where a column stands in operand order."""
    within = column - columns // 512 * 512
    words = -(-(columns % 512) // 64) * 2
    return column if within < 0 else column - within + within // words * (8 if words <= 8 else 16) + within % words


def draw(tokens: int, columns: int, experts: int, choices: int):
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(tokens, columns, generator=generator).half().to(DEVICE)
    return x, torch.randint(-1, experts + 1, (tokens, choices), generator=generator).to(DEVICE)


@given(columns=st.integers(1, 1200), intermediate=st.integers(1, 1200), tokens=st.integers(1, 5))
def test_columns_stand_where_the_operand_takes_them(columns, intermediate, tokens):
    x, ids = draw(tokens, columns, 3, 2)
    prepared = launch_prepare(x, ids, 3, intermediate, 64)
    assert_close(prepared.norms, x.float().norm(dim=1), torch.float32)
    places = [place_of(column, columns) for column in range(columns)]
    expected = torch.zeros_like(prepared.x)
    expected[:, places] = x
    assert torch.equal(prepared.x, expected)
    padding = torch.ones(prepared.h.shape[1], dtype=torch.bool)
    padding[[place_of(column, intermediate) for column in range(intermediate)]] = False
    assert not prepared.h[:, padding.to(DEVICE)].any()


@pytest.mark.parametrize(("tokens", "experts", "choices", "tile"), [(1, 1, 1, 64), (150, 9, 3, 64), (70, 2, 4, 128)])
def test_pairs_are_grouped_as_the_other_kernels_group_them(tokens, experts, choices, tile):
    x, ids = draw(tokens, 8, experts, choices)
    grouping, expected = launch_prepare(x, ids, experts, 8, tile).grouping, launch_group(ids, experts, tile)
    placed = int(expected.last[-1])
    assert torch.equal(grouping.pairs[:placed], expected.pairs[:placed])
    for name in ("first", "last", "tile_expert", "tile_first"):
        assert torch.equal(getattr(grouping, name), getattr(expected, name)), name


@pytest.mark.parametrize(("columns", "expected"), [(2048, 2048), (1408, 1536), (2816, 2816), (704, 768), (40, 256)])
def test_operand_columns_are_whole_or_half_blocks(columns, expected):
    assert operand_columns(columns) == expected


def test_inputs_in_their_own_order_are_not_copied():
    ids = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    x = torch.randn(3, 768, device=DEVICE).half()
    assert launch_prepare(x, ids, 1, 64, 64).x is x
    apart = torch.randn(3, 1536, device=DEVICE).half()[:, ::2]
    assert torch.equal(launch_prepare(apart, ids, 1, 64, 64).x, apart)
