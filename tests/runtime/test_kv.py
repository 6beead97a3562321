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
    assert gauge.read() == KVState(free_blocks=6, block_bytes=384)
    frames = arena.allocate(9, KV_OWNER)
    assert gauge.read().free_blocks == 3
    arena.free(frames[:3])
    assert gauge.read().free_blocks == 4
    with pytest.raises(ValueError, match="at least one"):
        ArenaGauge(arena, block_frames=0)


@pytest.mark.parametrize("state", [KVState(-1, 8), KVState(1, 0), KVState(1, 8, -1)])
def test_case_89_a_gauge_that_reports_the_impossible_is_refused(state):
    with pytest.raises(ValueError, match="KV"):
        CallableGauge(lambda: state).read()
