"""The device order: invertible, each bit where the definition says, padding zero when written and ignored when read."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pagedweight.kernels.device_order import (
    choose_frame_bytes,
    frame_waste,
    from_device_order,
    plane_geometry,
    row_words,
    stored_columns,
    to_device_order,
    waste_with_tables,
)
from tests.support import pack

REAL_SHAPES = {
    "Qwen1.5-MoE-A2.7B": (2048, 1408),
    "Mixtral-8x7B": (4096, 14336),
    "Gemma-4-26B-A4B": (2816, 704),
}

shapes = st.tuples(st.integers(1, 70), st.integers(1, 1200))


def random_planes(rows, columns, planes=2, seed=0):
    bits = torch.randint(0, 2, (planes, rows, columns), generator=torch.Generator().manual_seed(seed))
    return torch.cat([pack(plane, 1) for plane in bits]), bits


def geometry_of(rows, columns, groups):
    return plane_geometry(rows, columns, groups * 64 * row_words(columns))


def stored_bit(page, geometry, row, column):
    """The bit of one weight, by the definition of the order."""
    block, k = divmod(column, 512)
    words = 16 if block < geometry.columns // 512 else geometry.tail_words
    j, w = divmod(k, words)
    q = j & 15
    word = 2 * (w // 2) + (j >> 4)
    bit = 4 * (4 * ((q >> 1) & 1) + (q & 1) + 2 * (w & 1)) + (q >> 2)
    frame, r = divmod(row, geometry.rows_per_frame)
    byte = frame * geometry.frame_bytes + 4 * (geometry.rows_per_frame * 16 * block + r * words + word) + bit // 8
    return page[byte] >> (bit % 8) & 1


@given(shapes, st.integers(1, 4), st.integers(0, 99))
@example((1, 961), 1, 0)  # a tail of 16 words that is not a full block
def test_order_is_invertible(shape, groups, seed):
    planes, _ = random_planes(*shape, seed=seed)
    geometry = geometry_of(*shape, groups)
    pages = to_device_order(planes, geometry)
    assert pages.shape == (2, geometry.frames * geometry.frame_bytes)
    assert torch.equal(from_device_order(pages, geometry), planes)


@given(shapes, st.integers(1, 4))
@example((1, 961), 1)  # a tail of 16 words that is not a full block
@example((3, 500), 1)
def test_each_bit_lies_where_the_definition_says(shape, groups):
    rows, columns = shape
    planes, bits = random_planes(rows, columns, planes=1)
    geometry = geometry_of(rows, columns, groups)
    page = to_device_order(planes[0], geometry).tolist()
    row = rows // 2
    for column in range(columns):
        assert stored_bit(page, geometry, row, column) == bits[0, row, column]


@pytest.mark.parametrize("columns", range(1, 1600, 7))
def test_stored_columns_are_a_permutation(columns):
    stored = stored_columns(columns)
    assert sorted(stored) == list(range(32 * row_words(columns)))


@given(shapes, st.integers(1, 4))
def test_a_frame_depends_only_on_its_own_rows(shape, groups):
    rows, columns = shape
    planes, _ = random_planes(rows, columns, planes=1)
    geometry = geometry_of(rows, columns, groups)
    before = to_device_order(planes[0], geometry).reshape(geometry.frames, -1)
    changed = planes[0].clone()
    changed[: geometry.rows_per_frame] = ~changed[: geometry.rows_per_frame]
    if columns % 32:
        changed[:, -1] &= (1 << columns % 32) - 1
    after = to_device_order(changed, geometry).reshape(geometry.frames, -1)
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


@given(shapes, st.integers(1, 4))
def test_padding_is_zero_when_written_and_ignored_when_read(shape, groups):
    rows, columns = shape
    geometry = geometry_of(rows, columns, groups)
    ones = torch.full((rows, -(-columns // 32)), -1, dtype=torch.int32)
    page = to_device_order(ones, geometry)
    assert sum(int(byte).bit_count() for byte in page.tolist()) == rows * columns
    poisoned = torch.where(page == 0, 0xFF, page).to(torch.uint8)
    plain = from_device_order(page, geometry)
    zero = torch.zeros_like(ones)
    padding_only = poisoned & ~page
    assert torch.equal(from_device_order(padding_only, geometry), zero)
    assert torch.equal(from_device_order(poisoned, geometry), plain)


@pytest.mark.parametrize("name", REAL_SHAPES)
def test_frames_of_real_models_waste_under_three_percent(name):
    hidden, intermediate = REAL_SHAPES[name]
    model = [(2 * intermediate, hidden), (hidden, intermediate)]
    frame_bytes = choose_frame_bytes(model)
    waste = max(frame_waste(Counter(model), frame_bytes), waste_with_tables(Counter(model), frame_bytes))
    rows_per_frame = [plane_geometry(*shape, frame_bytes).rows_per_frame for shape in model]
    print(f"{name}: frame {frame_bytes} B, rows per frame {rows_per_frame}, waste {100 * waste:.2f} %")
    assert 4096 <= frame_bytes <= 65536
    assert waste <= 0.03


@given(st.lists(shapes, min_size=1, max_size=4))
def test_chosen_frame_fits_every_shape(model):
    frame_bytes = choose_frame_bytes(model)
    assert frame_bytes % 128 == 0
    for rows, columns in model:
        geometry = plane_geometry(rows, columns, frame_bytes)
        assert geometry.frames * geometry.rows_per_frame >= rows


@pytest.mark.parametrize(
    ("rows", "columns", "frame_bytes", "says"),
    [
        (0, 64, 4096, "at least 1"),
        (16, 64, 100, "multiple of 128"),
        (16, 4096, 4096, "give at least 8192"),
    ],
)
def test_impossible_geometry_is_refused(rows, columns, frame_bytes, says):
    with pytest.raises(ValueError, match=says):
        plane_geometry(rows, columns, frame_bytes)


def test_wrong_planes_are_refused():
    geometry = plane_geometry(16, 64, 128)
    with pytest.raises(ValueError, match="give int32"):
        to_device_order(torch.zeros(16, 3, dtype=torch.int32), geometry)
    with pytest.raises(ValueError, match="give uint8"):
        from_device_order(torch.zeros(100, dtype=torch.uint8), geometry)
