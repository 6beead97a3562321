"""How many rows rise at a boundary follows the steps between boundaries."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_pace import Pace
from tests.runtime.support import tiny_model, tiny_runtime

seconds = st.floats(-1e6, 1e6)


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pace_after(intervals: list[float], *, timed: bool = True) -> Pace:
    pace, clock = Pace(timed=timed), Clock()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "perf_counter", clock)
        for interval in [0.0, *intervals]:
            clock.now += interval
            pace.tick()
    return pace


@given(st.lists(seconds, max_size=20))
def test_the_pace_stays_in_its_bounds_whatever_the_clock_does(intervals):
    assert 8 <= pace_after(intervals).rows <= 256
    assert pace_after(intervals, timed=False).rows == 32


@given(st.lists(st.floats(1e-4, 1.0), min_size=9, max_size=9), st.floats(1.0, 10.0))
def test_longer_steps_bring_back_no_fewer_rows(intervals, factor):
    assert pace_after(intervals).rows <= pace_after([factor * interval for interval in intervals]).rows


@pytest.mark.parametrize(("step", "rows"), [(4.3e-3, 8), (20e-3, 20), (71e-3, 71), (1.0, 256)])
def test_a_boundary_launches_raises_for_a_twentieth_of_a_step(step, rows):
    assert pace_after([step] * 9).rows == pytest.approx(rows, abs=1)
    assert pace_after([step] * 7 + [3600.0]).rows == pytest.approx(rows, abs=1)  # nobody asked for an hour


@pytest.mark.parametrize(("step_seconds", "fewest", "most"), [(1e-3, 1, 8), (30e-3, 9, 30)])
def test_rows_come_back_as_fast_as_steps_have_time_for(step_seconds, fewest, most, monkeypatch):
    clock, model = Clock(), tiny_model(experts=(20, 20))
    monkeypatch.setattr(time, "perf_counter", clock)
    config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=1)
    runtime, risen = tiny_runtime(model, model.resident_frames(6) + 200, config), []
    for step in range(60):
        if step == 10:
            runtime.set_bits(2)
        clock.now += step_seconds
        before = runtime.snapshot().moves.raised_rows
        runtime.boundary()
        risen.append(runtime.snapshot().moves.raised_rows - before)
    assert (runtime.snapshot().bits == 6).all()
    assert fewest <= max(risen) <= most
    runtime.close()
