"""The shared vocabulary: rows number the linear-blocks in order, and impossible layouts are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.layout import BlockId, Layout, MoeLayer, Projection, RoutingStats, normalized_widths

LUT16 = dict.fromkeys(range(2, 9), "lut16")


@st.composite
def layouts(draw):
    numbers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True))
    sizes = st.integers(1, 9)
    moe_layers = tuple(MoeLayer(n, draw(sizes), draw(sizes), draw(sizes)) for n in sorted(numbers))
    return Layout(moe_layers, normalized_widths(tuple(draw(st.sets(st.integers(2, 8), min_size=1)))), LUT16)


@given(layouts())
def test_rows_number_the_blocks_in_order(layout):
    blocks = list(layout.blocks())
    assert [layout.row(block) for block in blocks] == list(range(layout.rows))
    assert len(layout.row_shapes()) == layout.rows
    for index, moe_layer in enumerate(layout.moe_layers):
        assert blocks[layout.first_row(index)] == BlockId(moe_layer.layer, 0, Projection.GATE_UP)
        assert layout.row_shapes()[layout.first_row(index) + 1] == (moe_layer.hidden, moe_layer.intermediate)


@given(layouts())
def test_weights_are_three_matrices_per_expert(layout):
    expected = sum(3 * m.experts * m.hidden * m.intermediate for m in layout.moe_layers)
    assert layout.weights() == expected
    assert layout.floor_width == min(layout.widths)
    assert layout.parent_width == max(layout.widths)


def test_blocks_outside_the_layout_have_no_row():
    layout = Layout((MoeLayer(3, 2, 8, 8),), (2, 4), LUT16)
    for block in (BlockId(0, 0, Projection.DOWN), BlockId(3, 2, Projection.DOWN), BlockId(3, -1, Projection.DOWN)):
        with pytest.raises(KeyError, match="not in the layout"):
            layout.row(block)


@pytest.mark.parametrize("widths", [(1,), (9,), (), (0, 4)])
def test_case_13_unsupported_widths_are_refused(widths):
    with pytest.raises(ValueError, match="from 2 to 8"):
        normalized_widths(widths)


@pytest.mark.parametrize("widths", [("2", ",", "4"), (2.0, 4.0), (2, None)])
def test_widths_that_are_no_ints_are_refused(widths):
    with pytest.raises(TypeError, match=r"widths are .*; give ints"):
        normalized_widths(widths)


@pytest.mark.parametrize(("widths", "expected"), [((2, 3, 4), (2, 3, 4)), ((4, 4), (4,)), ((5, 3), (3, 5))])
def test_case_13_widths_are_sorted_and_unique(widths, expected):
    assert normalized_widths(widths) == expected


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MoeLayer(0, 0, 8, 8), "experts is 0"),
        (lambda: MoeLayer(0, 4, 8, 8, "relu"), "layer 0: activation is 'relu'"),
        (lambda: MoeLayer(0, 4, 8, 8, "gpt_oss"), "'gpt_oss' with limit 0.0"),
        (lambda: MoeLayer(0, 4, 8, 8, "gpt_oss", limit=float("inf")), "with limit inf"),
        (lambda: MoeLayer(0, 4, 8, 8, "silu", limit=7.0), "'silu' with limit 7.0"),
        (lambda: MoeLayer(0, 4, 8, 8, "clamped_silu", False, 7.0), "'clamped_silu' needs a gate"),
        (lambda: Layout((), (2,), LUT16), "no MoE layer"),
        (lambda: Layout((MoeLayer(0, 1, 8, 8),), (4, 2), LUT16), "give them sorted"),
        (lambda: Layout((MoeLayer(0, 1, 8, 8),), (2, 4), {2: "lut16"}), r"widths \[4\] have no known codebook"),
        (lambda: Layout((MoeLayer(0, 1, 8, 8),), (5,), {5: "lut8"}), "lut8 at 5 bits"),
        (lambda: Layout((MoeLayer(0, 1, 8, 8),), (2,), {2: "cubic"}), "cubic at 2 bits"),
    ],
)
def test_impossible_layouts_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_experts_without_a_gate_have_half_the_rows():
    gated, alone = MoeLayer(0, 4, 8, 6), MoeLayer(0, 4, 8, 6, "relu2", gated=False)
    assert [gated.shape(p) for p in Projection] == [(12, 8), (8, 6)]
    assert [alone.shape(p) for p in Projection] == [(6, 8), (8, 6)]


def test_statistics_begin_at_zero_in_the_types_that_kernels_expect():
    stats = RoutingStats.zeros(2, 3, 5)
    assert stats.mass.shape == stats.counts.shape == (2, 3, 5)
    assert stats.features.shape == (2, 3, 5, 2, 3)
    assert [t.dtype for t in stats] == [torch.float32, torch.int32, torch.float32]
    assert not any(t.any() for t in stats)
    assert str(BlockId(1, 2, Projection.GATE_UP)) == "layers.1.experts.2.gate_up"
