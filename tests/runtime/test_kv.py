import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.runtime.frames import KV_OWNER, Arena
from pagedweight.runtime.kv import ArenaGauge, CallableGauge, KVState, target_bytes


@given(st.integers(0, 50), st.integers(1, 4096), st.integers(0, 50), st.integers(0, 50))
def test_target_bytes_brings_free_blocks_just_above_the_threshold(free, block_bytes, pending, threshold):
    state = KVState(free, block_bytes, pending)
    released_blocks = target_bytes(state, threshold) // block_bytes
    after = state.headroom_blocks + released_blocks
    assert after > threshold
    assert released_blocks == 0 or after == threshold + 1


def test_arena_gauge_counts_what_could_be_allocated():
    arena = Arena(20 * 128, 128)
    gauge = ArenaGauge(arena, block_frames=3)
    assert gauge.read() == KVState(free_blocks=6, block_bytes=384, spare_bytes=2 * 128)
    frames = arena.allocate(9, KV_OWNER)
    assert gauge.read().free_blocks == 3
    arena.free(frames[:3])
    assert gauge.read().free_blocks == 4
    with pytest.raises(ValueError, match="at least one"):
        ArenaGauge(arena, block_frames=0)


@given(st.integers(0, 60), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_whoever_takes_the_bytes_above_a_threshold_leaves_one_block_more_and_nothing_else(free, frames, at, pending):
    arena = Arena(60 * 128, 128)
    arena.allocate(60 - free, KV_OWNER)
    gauge = ArenaGauge(arena, frames)
    above = gauge.read()._replace(pending_blocks=pending).bytes_above(at)
    if above >= 0:
        arena.allocate(above // 128, KV_OWNER)
        assert arena.free_frames == (at + 1 + pending) * frames


@pytest.mark.parametrize("state", [KVState(-1, 8), KVState(1, 0), KVState(1, 8, -1), KVState(1, 8, 0, -1)])
def test_case_89_a_gauge_that_reports_the_impossible_is_refused(state):
    with pytest.raises(ValueError, match="KV"):
        CallableGauge(lambda: state).read()
