import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.runtime.frames import KV_OWNER, Arena, OutOfFrames, Owner, OwnerKind

PLANE = Owner(OwnerKind.PLANE, 3)
TABLE = Owner(OwnerKind.TABLE, 3)
FRAME_BYTES = 128


def small_arena(frames: int = 24) -> Arena:
    return Arena(frames * FRAME_BYTES, FRAME_BYTES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["single", "run", "free"]), st.integers(0, 9)), max_size=40))
def test_every_frame_has_one_owner_whatever_the_order(steps):
    arena, held = small_arena(), []
    for verb, size in steps:
        try:
            if verb == "single":
                held.append(arena.allocate(size, KV_OWNER))
            elif verb == "run" and size:
                first = arena.allocate_run(size, TABLE)
                held.append(np.arange(first, first + size))
            elif verb == "free" and held:
                arena.free(held.pop(size % len(held)))
        except OutOfFrames:
            pass
        arena.check()
        owned = np.concatenate([*held, np.empty(0, np.int64)])
        assert len(np.unique(owned)) == len(owned)
        assert arena.free_frames == arena.frames - len(owned)
        assert sum(arena.bytes_by_owner().values()) == arena.frames * FRAME_BYTES


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 23)), st.integers(1, 24))
def test_a_run_is_refused_only_when_none_is_long_enough(taken, count):
    arena = small_arena()
    everything = arena.allocate(24, KV_OWNER)
    arena.free(np.array([f for f in everything if f not in taken], dtype=np.int64))
    fits = any(not taken & set(range(first, first + count)) for first in range(24 - count + 1))
    try:
        first = arena.allocate_run(count, TABLE)
    except OutOfFrames:
        assert not fits
    else:
        assert fits
        assert not taken & set(range(first, first + count))
    arena.check()


def test_searches_cross_their_scan_windows():
    arena = Arena(20_000 * FRAME_BYTES, FRAME_BYTES)
    everything = arena.allocate(20_000, KV_OWNER)
    arena.free(everything[::2])
    with pytest.raises(OutOfFrames):
        arena.allocate_run(2, TABLE)
    arena.free(everything[[19_001, 11]])
    assert arena.allocate_run(3, TABLE) == 10
    assert arena.allocate_run(3, TABLE) == 19_000
    assert len(arena.allocate(9_996, PLANE)) == 9_996
    assert arena.free_frames == 0
    arena.check()


def test_singles_come_from_the_high_end_and_runs_from_the_low_end():
    arena = small_arena()
    assert arena.allocate_run(3, TABLE) == 0
    assert arena.allocate(2, PLANE).tolist() == [22, 23]


def test_out_of_frames_allocates_nothing():
    arena = small_arena(4)
    arena.allocate(3, PLANE)
    for allocate in (arena.allocate, arena.allocate_run):
        with pytest.raises(OutOfFrames, match="2 frames"):
            allocate(2, KV_OWNER)
    assert arena.free_frames == 1
    arena.check()


def test_case_81_a_frame_given_back_twice_is_an_error_and_reaches_one_owner():
    arena = small_arena()
    frames = arena.allocate(4, PLANE)
    arena.free(frames)
    with pytest.raises(ValueError, match="free already"):
        arena.free(frames)
    first, second = arena.allocate(4, PLANE), arena.allocate(4, PLANE)
    assert not set(first) & set(second)
    with pytest.raises(ValueError, match="named twice"):
        arena.free([int(first[0]), int(first[0])])
    assert arena.free_frames == 24 - 8
    arena.check()


def test_views_and_addresses_name_the_same_bytes():
    arena = small_arena()
    first = arena.allocate_run(2, TABLE)
    view = arena.view(first, 2)
    assert view.data_ptr() == arena.address(np.array([first]))[0]
    assert arena.memory.data_ptr() % 128 == 0
    assert view.numel() == 2 * FRAME_BYTES
    assert arena.owner(first) == TABLE
    assert np.flatnonzero(arena.kinds == OwnerKind.TABLE).tolist() == [first, first + 1]


def test_the_budget_is_never_passed_and_must_hold_a_frame():
    assert Arena(1000, FRAME_BYTES).memory.numel() == 7 * FRAME_BYTES
    with pytest.raises(ValueError, match="raise it"):
        Arena(100, FRAME_BYTES)
    with pytest.raises(ValueError, match="multiple of 128"):
        Arena(1000, 100)


def test_case_83_an_arena_born_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        arena = small_arena()
    arena.memory.fill_(7)
    assert int(arena.rows[5, 5]) == 7


def test_a_view_is_of_one_frame_or_of_a_run():
    arena = small_arena()
    assert arena.view(3).data_ptr() == arena.memory.data_ptr() + 3 * arena.frame_bytes
    assert (len(arena.view(3)), len(arena.view(3, 2))) == (arena.frame_bytes, 2 * arena.frame_bytes)
