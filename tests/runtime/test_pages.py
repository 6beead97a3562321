import warnings

import numpy as np
import pytest
import torch

from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry
from pagedweight.layout import Layout, MoeLayer
from pagedweight.runtime.host_memory import _power_of_two_above
from pagedweight.runtime.pages import HostPages, PageSizes

LAYOUT = Layout((MoeLayer(0, 2, 8, 4),), (2, 4), {2: "lut16", 4: "lut16"})


def sizes(frame_bytes: int = 128) -> PageSizes:
    return PageSizes.of(LAYOUT, np.array([2, 1, 2, 1]), frame_bytes)


def test_resident_bytes_count_planes_the_width_table_and_the_floor_table_once():
    held = sizes().resident_bytes() // 128
    # Row 0: N = 8, so the 2-bit table is 64 bytes (1 frame), the 4-bit table 256 bytes (2 frames).
    assert held[0].tolist() == [2 * 2 + 1, 4 * 2 + 2 + 1]
    assert held[1].tolist() == [2 * 1 + 1, 4 * 1 + 2 + 1]
    with pytest.raises(ValueError, match="4 rows"):
        PageSizes.of(LAYOUT, np.array([1, 2]), 128)


def test_a_slot_has_room_for_every_narrower_table_above_the_floor():
    layout = Layout((MoeLayer(0, 1, 64, 32),), (2, 3, 4, 5, 6), dict(enumerate(("lut8",) * 3 + ("cubic", "affine"), 2)))
    found = PageSizes.of(layout, np.array([2, 2]), 128)
    # N = 64 rows of 8, 12, 20, 8 and 8 bytes; at 5 and 6 bits the slot stays as large as the 4-bit table.
    assert found.table_frames[0].tolist() == [4, 6, 10, 10, 10]
    assert (found.resident_bytes()[0] // 128).tolist() == [4 + 4, 6 + 6 + 4, 8 + 10 + 4, 10 + 10 + 4, 12 + 10 + 4]


def test_pages_and_tables_come_back_bit_equal_and_padded_with_zeros():
    host = HostPages(sizes())
    page = torch.randint(0, 256, (256,), dtype=torch.uint8)
    table = torch.randn(8, 4).half()
    host.store(0, 3, page)
    host.store_table(0, 2, table)
    assert torch.equal(host.page(0, 3), page)
    kept = host.table(0, 2)
    assert torch.equal(kept[:64].view(torch.float16).view(8, 4), table)
    assert kept.numel() == 128
    assert not kept[64:].any()
    assert host.bytes == 256 + 128
    assert host.page(0, 2) is None


def test_a_copy_does_not_alias_what_was_stored():
    host = HostPages(sizes())
    page = torch.zeros(256, dtype=torch.uint8)
    host.store(0, 0, page)
    page.fill_(9)
    assert not host.page(0, 0).any()


def test_room_is_reserved_once_and_becomes_the_copy():
    host = HostPages(sizes())
    room = host.reserve(0, 0)
    assert host.reserve(0, 0) is room
    assert host.page(0, 0) is None
    host.store(0, 0, room)
    assert host.page(0, 0) is room


@pytest.mark.parametrize("data", [torch.zeros(255, dtype=torch.uint8), torch.zeros(64, dtype=torch.int32)])
def test_pages_of_another_size_are_refused(data):
    with pytest.raises(ValueError, match="give 256 of"):
        HostPages(sizes()).store(0, 0, data)


def test_a_table_larger_than_its_frames_and_a_page_stored_twice_are_refused():
    host = HostPages(sizes())
    with pytest.raises(ValueError, match="frames hold 128"):
        host.store_table(0, 2, torch.zeros(8, 16, dtype=torch.float16))
    host.store(0, 0, torch.zeros(256, dtype=torch.uint8))
    with pytest.raises(ValueError, match="never change"):
        host.store(0, 0, torch.zeros(256, dtype=torch.uint8))


class Numbered:
    """A source whose pages say which they are, and that counts how often it is asked."""

    asked = 0

    def page(self, row, plane):
        self.asked += 1
        return torch.full((int(sizes().plane_frames[row]) * 128,), 16 * row + plane, dtype=torch.uint8)


def test_with_a_source_nothing_need_be_kept_and_every_page_can_be_had():
    host = HostPages(sizes(), 0, source := Numbered())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row, plane in np.ndindex(4, 4):
            if host.keeps(plane):
                host.store(row, plane, source.page(row, plane))
    assert host.bytes == 0
    asked = source.asked
    assert all(host.has(row, plane) for row, plane in np.ndindex(4, 4))
    assert source.asked == asked
    assert all((host.page(row, plane) == 16 * row + plane).all() for row, plane in np.ndindex(4, 4))
    host.close()
    assert host.page(0, 0) is None


@pytest.mark.parametrize(
    ("source", "rest"), [(None, "kept in pageable memory"), (Numbered(), "read from the checkpoint's files")]
)
def test_one_warning_says_where_further_pages_are_and_points_at_who_stored_one(source, rest):
    host = HostPages(sizes(), 1, source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        host.store(0, 2, torch.zeros(256, dtype=torch.uint8))
        host.store(0, 3, torch.zeros(256, dtype=torch.uint8))
    assert [f"used up at 0 bytes; further pages are {rest}" in str(w.message) for w in caught] == [True]
    assert caught[0].filename == __file__
    assert host.bytes == (512 if source is None else 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine that can page-lock memory")
def test_what_the_system_will_not_page_lock_is_pageable():
    host = HostPages(sizes(), None)
    with pytest.warns(RuntimeWarning, match="the system's limit"):
        host.store(0, 2, torch.ones(256, dtype=torch.uint8))
    assert host.page(0, 2).sum() == 256
    assert host.pinned_bytes == 0


@pytest.mark.gpu
def test_with_a_source_the_upper_planes_are_kept_as_far_as_page_locked_memory_goes():
    frames_per_plane = np.full(4, 64)
    page = torch.zeros(64 * 4096, dtype=torch.uint8)
    host = HostPages(PageSizes.of(LAYOUT, frames_per_plane, 4096), 2**20, Numbered())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row, plane in np.ndindex(4, 4):
            if host.keeps(plane):
                host.store(row, plane, page)
    assert ["checkpoint's files" in str(w.message) for w in caught] == [True]
    kept = [(row, plane) for row, plane in np.ndindex(4, 4) if host.page(row, plane).numel() == page.numel()]
    assert 0 < len(kept) <= 4
    assert all(plane >= 2 and host.page(row, plane).is_pinned() for row, plane in kept)
    assert host.pinned_bytes <= 2**20
    host.close()


@pytest.mark.gpu
def test_case_75_page_locked_memory_is_no_more_than_the_pages_need():
    """Pages of 2^n + 1 frames, which an allocator that rounds up would almost double."""
    frames_per_plane = np.array([17, 9, 17, 9])
    layout = Layout((MoeLayer(0, 200, 8, 4),), (2, 4), {2: "lut16", 4: "lut16"})
    host = HostPages(PageSizes.of(layout, np.tile(frames_per_plane, 100), 4096), pinned_bytes=None)
    for row, plane in np.ndindex(layout.rows, 4):
        host.store(row, plane, torch.zeros(int(frames_per_plane[row % 4]) * 4096, dtype=torch.uint8))
    assert host.page(3, 3).is_pinned()
    assert host.pinned_bytes <= 1.1 * host.bytes
    host.close()


@pytest.mark.gpu
def test_pages_beyond_the_page_locked_budget_are_pageable_with_one_warning():
    frames_per_plane = np.array([64, 64, 64, 64])
    host = HostPages(PageSizes.of(LAYOUT, frames_per_plane, 4096), pinned_bytes=2**20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row, plane in np.ndindex(4, 4):
            host.store(row, plane, torch.zeros(64 * 4096, dtype=torch.uint8))
        host.store_table(0, 2, torch.zeros(8, 4, dtype=torch.float16))
    assert ["host_pinned_bytes" in str(w.message) for w in caught] == [True]
    assert host.page(0, 0).is_pinned()
    assert not host.page(3, 3).is_pinned()
    assert host.table(0, 2).is_pinned()
    assert host.pinned_bytes <= 2**20
    host.close()


@pytest.mark.parametrize(
    ("shape", "frame_bytes", "most_waste"),
    [
        (MoeLayer(0, 60, 2048, 1408), 45056, 0.024),  # Qwen1.5-MoE
        (MoeLayer(0, 8, 4096, 14336), 57344, 0.002),  # Mixtral-8x7B
        (MoeLayer(0, 128, 2816, 704), 22528, 0.008),  # Gemma-4-26B-A4B; tables fill frames of 61,952 bytes badly
    ],
)
def test_true_shapes_hold_little_more_than_their_bytes(shape, frame_bytes, most_waste):
    widths = (2, 3, 4, 5, 6)
    layout = Layout((shape,), widths, dict.fromkeys(widths, "lut16"))
    frames = [plane_geometry(n, k, frame_bytes).frames for n, k in layout.row_shapes()]
    held = PageSizes.of(layout, np.array(frames), frame_bytes).resident_bytes().sum(axis=0)
    for at, bits in enumerate(widths):
        tables = (bits, 2) if bits > 2 else (2,)
        payload = sum(bits * n * k // 8 + 2 * n * sum(2**b for b in tables) for n, k in layout.row_shapes())
        assert payload <= held[at] <= (1 + most_waste) * payload
    assert choose_frame_bytes(layout.row_shapes()) == frame_bytes


@pytest.mark.parametrize("frame_bytes", [128, 2**16])
def test_pages_share_one_piece_of_memory_no_larger_than_they_are(frame_bytes):
    own = sizes(frame_bytes)
    host = HostPages(own)
    for row, plane in np.ndindex(4, 4):
        host.store(row, plane, torch.zeros(int(own.plane_frames[row]) * frame_bytes, dtype=torch.uint8))
    storages = {page.untyped_storage().data_ptr(): page.untyped_storage().nbytes() for page in host._pages.values()}
    assert list(storages.values()) == [max(host.bytes, 2**16)]


def test_pages_of_the_floor_are_left_to_the_source():
    assert [HostPages(sizes(), 2**20, Numbered()).keeps(plane) for plane in range(4)] == [False, False, True, True]
    assert all(HostPages(sizes()).keeps(plane) for plane in range(4))


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16)])
def test_a_page_locked_piece_is_the_least_power_of_two_that_holds_it(count, expected):
    assert _power_of_two_above(count) == expected
