"""Launch settings: every choice fits its device, and impossible settings are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.kernels.launch import LaunchConfig, choose, is_legal, shared_bytes


@pytest.mark.parametrize("shared_limit", [65536, 101376, 232448])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("experts", [8, 60, 128])
@pytest.mark.parametrize("pairs", [1, 64, 4096, 1 << 16])
def test_case_60_the_choice_fits_small_devices(shared_limit, element_bytes, experts, pairs):
    assert is_legal(choose(experts, pairs, element_bytes, shared_limit), element_bytes, shared_limit)


@given(st.integers(1, 512), st.integers(0, 1 << 17), st.sampled_from([2, 4]), st.integers(16 * 1024, 1 << 18))
def test_every_device_with_16_kib_has_a_legal_choice(experts, pairs, element_bytes, shared_limit):
    assert is_legal(choose(experts, pairs, element_bytes, shared_limit), element_bytes, shared_limit)


def test_a_device_too_small_for_any_tile_is_refused():
    with pytest.raises(ValueError, match="the device allows 1024 bytes"):
        choose(8, 16, 2, 1024)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_m": 24},  # not a power of two
        {"block_m": 8},  # under a tensor-core tile
        {"block_n": 16},  # gate_up would have 8 rows of each
        {"words": 0},
        {"num_stages": 0},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LaunchConfig(**settings)


def test_more_stages_need_more_memory():
    assert shared_bytes(LaunchConfig(num_stages=4), 2) > shared_bytes(LaunchConfig(num_stages=2), 2)
