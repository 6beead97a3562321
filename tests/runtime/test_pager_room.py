"""Frames that move within the arena: a table finds its run whenever the bytes are there, and every reader follows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.runtime.frames import FIXED_KV_OWNER, KV_OWNER, Arena, OutOfFrames, OwnerKind
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.pager_room import Room
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import Transition
from pagedweight.runtime.transfer import ImmediateEngine
from tests.runtime.support import FRAME_BYTES, CrankedEngine, TransferFault, assert_published, tiny_model

WIDTHS = (2, 3, 4, 6)
ROWS = 10


class Crowd:
    """Weights at random widths and KV frames, each with its own number in every byte, scattered over an arena."""

    def __init__(self, spare_frames: int, engine: type = ImmediateEngine, *, kv_moves: bool = True) -> None:
        self.model = tiny_model(widths=WIDTHS)
        self.arena = Arena((self.model.resident_frames(2) + spare_frames) * FRAME_BYTES, FRAME_BYTES)
        self.engine = engine(self.arena)
        if engine is CrankedEngine:
            self.engine.model = self.model
        self.table = PageTable(self.model.layout, self.model.sizes, self.arena, self.engine.upload)
        self.pager = Pager(self.table, self.arena, self.model.host, self.engine)
        self.kv: dict[int, int] = {}
        if kv_moves:
            self.pager.follow_kv(self.kv_moved)
        self.go(dict.fromkeys(range(ROWS), 2))

    def kv_moved(self, sources, targets):
        moved = {int(target): self.kv.pop(int(source)) for source, target in zip(sources, targets, strict=True)}
        assert not set(moved) & set(self.kv)
        self.kv |= moved

    def go(self, wanted: dict[int, int]) -> None:
        at = self.table.committed
        moves = [Transition(row, int(at[row]), bits, 0) for row, bits in wanted.items() if at[row] != bits]
        self.pager.lower(moves)
        self.table.publish()
        self.pager.start(moves)
        self.pager.settle()

    def fill_kv(self, frames: int, keep: list[bool]) -> None:
        """KV takes so many frames and gives some of them back."""
        for number, frame in enumerate(self.arena.allocate(min(frames, self.arena.free_frames), KV_OWNER).tolist()):
            self.arena.rows[frame] = number % 251
            self.kv[frame] = number % 251
        for frame, kept in zip(list(self.kv), keep, strict=False):
            if not kept:
                del self.kv[frame]
                self.arena.free([frame])

    def check(self) -> None:
        self.arena.check()
        self.table.check()
        assert_published(self.model, self.table.tables, self.arena)
        assert set(self.kv) == set(np.flatnonzero(self.arena.kinds == OwnerKind.KV).tolist())
        assert all((self.arena.rows[frame] == number).all() for frame, number in self.kv.items())


steps = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, ROWS - 1), st.sampled_from(WIDTHS), max_size=4),
        st.integers(0, 60),
        st.lists(st.booleans(), max_size=60),
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 150), steps, st.floats(0, 1), st.integers(0, ROWS - 1))
def test_a_run_is_had_whenever_the_bytes_are_there(spare, steps, share, row):
    crowd = Crowd(spare)
    for wanted, frames, keep in steps:
        crowd.go(wanted)
        crowd.fill_kv(frames, keep)
        crowd.check()
    count = max(1, round(share * crowd.arena.free_frames))
    if count <= crowd.arena.free_frames:
        room = Room(crowd.table, crowd.arena, crowd.engine)
        room.kv_moved = crowd.kv_moved
        first = room.allocate_run(count, row)
        crowd.table.publish()
        assert crowd.arena.are_owned_by(np.arange(first, first + count), crowd.arena.owner(first))
        crowd.arena.rows[first : first + count] = 0xEE
        crowd.check()


def test_a_raise_finds_its_run_among_scattered_kv_and_forwards_read_the_right_bytes_all_the_while():
    crowd = Crowd(150, CrankedEngine)
    crowd.fill_kv(150, [index % 2 == 0 for index in range(150)])
    crowd.engine.launch_forward(crowd.table.tables)
    at = crowd.arena.free_frames
    crowd.pager.start([Transition(6, 2, 6, 0)])
    crowd.engine.launch_forward(crowd.table.tables)
    crowd.check()
    crowd.pager.settle()
    assert crowd.table.committed[6] == 6
    assert crowd.pager.moves.relocated_bytes > 0
    assert crowd.pager.moves.deferred_rows == 0
    assert crowd.arena.free_frames < at
    crowd.engine.launch_forward(crowd.table.tables)
    crowd.engine.close()
    crowd.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 150), steps, st.integers(1, 20), st.integers(0, 40))
def test_windows_for_fixed_kv_are_had_wherever_no_table_stands(spare, steps, count, origin):
    crowd = Crowd(spare)
    for wanted, frames, keep in steps:
        crowd.go(wanted)
        crowd.fill_kv(frames, keep)
    windows = []
    while True:
        try:
            windows.append(crowd.pager.allocate_window(count, origin))
        except OutOfFrames:
            break
        assert (windows[-1] - origin) % count == 0
        assert crowd.arena.are_owned_by(np.arange(windows[-1], windows[-1] + count), FIXED_KV_OWNER)
        crowd.kv |= dict.fromkeys(range(windows[-1], windows[-1] + count), 0xEE)
        crowd.arena.rows[windows[-1] : windows[-1] + count] = 0xEE
        crowd.check()
    starts = set(range(origin, crowd.arena.frames - count + 1, count)) - set(windows)
    tables = crowd.arena.kinds == OwnerKind.TABLE
    assert crowd.arena.free_frames < count or all(tables[start : start + count].any() for start in starts)
    # Raises find their runs beside them, and leave them where they are.
    for row in range(ROWS):
        crowd.pager.start([Transition(row, 2, 3, 0)] if crowd.table.committed[row] == 2 else [])
        crowd.pager.settle()
        crowd.check()


def test_pages_on_their_way_give_a_window_up():
    crowd = Crowd(150, CrankedEngine)
    crowd.pager.start([Transition(row, 2, 6, 0) for row in range(3)])
    coming = (crowd.arena.kinds == OwnerKind.PLANE) & crowd.table.busy()[crowd.arena.owner_rows]
    highest = int(np.flatnonzero(coming)[-1])
    crowd.pager.allocate_window(crowd.arena.frames - highest, highest)
    assert crowd.pager.moves.cancelled_rows == 3
    crowd.kv |= {int(frame): 0 for frame in np.flatnonzero(crowd.arena.kinds == OwnerKind.KV)}
    crowd.arena.rows[list(crowd.kv)] = 0
    crowd.check()


def test_kv_that_nobody_follows_and_pages_in_transfer_stay_where_they_are():
    crowd = Crowd(300, CrankedEngine, kv_moves=False)
    crowd.pager.start([Transition(1, 2, 6, 0)])
    landing = crowd.table.frames[1].copy()
    crowd.fill_kv(300, [index % 2 == 0 for index in range(300)])
    held = set(crowd.kv)
    crowd.pager.start([Transition(0, 2, 6, 0), Transition(2, 2, 4, 0)])
    assert set(crowd.kv) == held
    assert np.array_equal(crowd.table.frames[1], landing)
    crowd.pager.settle()
    crowd.check()


def test_a_relocation_that_fails_moves_nothing_and_may_be_tried_again():
    crowd = Crowd(150, CrankedEngine)
    crowd.fill_kv(150, [index % 2 == 0 for index in range(150)])
    owned, held = crowd.arena.bytes_by_owner(), dict(crowd.kv)
    crowd.engine.fail_next_write = True
    with pytest.raises(TransferFault):
        crowd.pager.start([Transition(6, 2, 6, 0)])
    assert crowd.arena.bytes_by_owner() == owned
    assert crowd.kv == held
    crowd.check()
    crowd.go({6: 6})
    assert crowd.table.committed[6] == 6
    crowd.check()


def with_tables_apart() -> tuple[Crowd, Room]:
    """Tables at every 40th frame, so that no long window is free of them."""
    crowd = Crowd(400)
    room = Room(crowd.table, crowd.arena, crowd.engine)
    for at, (first, count) in enumerate(crowd.table.table_runs()):
        place = 40 * (at + 1)
        if all(crowd.arena.kinds[place : place + count] == OwnerKind.FREE):
            room._exchange(first, place, count)
    crowd.table.publish()
    crowd.check()
    return crowd, room


def test_tables_that_stand_apart_are_packed_when_no_window_is_free_of_them():
    crowd, room = with_tables_apart()
    arena, table = crowd.arena, crowd.table
    runs, wanted = table.table_runs(), arena.free_frames
    with pytest.raises(OutOfFrames):
        arena.allocate_run(wanted, KV_OWNER)
    room.allocate_run(wanted, 0)
    table.publish()
    crowd.check()
    counts = [count for _, count in table.table_runs()]
    assert [first for first, _ in table.table_runs()] == (np.cumsum(counts) - counts).tolist()
    assert sorted(counts) == sorted(count for _, count in runs)


def test_only_so_many_tables_are_packed_at_one_boundary_and_the_rest_at_later_ones(monkeypatch):
    monkeypatch.setattr("pagedweight.runtime.pager_room._MOST_PACKED", 3)
    crowd, room = with_tables_apart()
    wanted, moved = crowd.arena.free_frames, []
    while True:
        before = {first for first, _ in crowd.table.table_runs()}
        room.renew(wanted)
        try:
            room.allocate_run(wanted, 0)
        except OutOfFrames:
            crowd.table.publish()
            moved.append(len(before - {first for first, _ in crowd.table.table_runs()}))
            crowd.check()
            continue
        break
    assert len(moved) >= 2
    assert all(0 < count <= 3 for count in moved)


def test_one_window_serves_all_tables_of_a_boundary():
    crowd = Crowd(300)
    crowd.fill_kv(300, [index % 2 == 0 for index in range(300)])
    searched = []
    find = crowd.pager._loads.room._cheapest_window
    crowd.pager._loads.room._cheapest_window = lambda count: searched.append(count) or find(count)
    crowd.pager.start([Transition(row, 2, 4, 0) for row in range(4)])
    assert len(searched) == 1
    assert searched[0] == int(crowd.table.table_frames(np.arange(4), 4).sum())
    crowd.pager.settle()
    assert (crowd.table.committed[:4] == 4).all()
    crowd.check()


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([1, 5, 9], [0, 2, 3]), ([3, 4, 5], [2, 3, 4]), ([2, 7], [7, 2])],
    ids=["to free frames", "one frame down, over itself", "exchanged"],
)
def test_bytes_move_as_if_all_were_read_before_one_is_written(sources, targets):
    arena = Arena(16 * FRAME_BYTES, FRAME_BYTES)
    arena.rows[:] = torch.arange(16, dtype=torch.uint8)[:, None]
    ImmediateEngine(arena).relocate(np.array(sources), np.array(targets))
    assert arena.rows[targets, 0].tolist() == sources
