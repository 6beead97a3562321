import numpy as np
import pytest
import torch

from pagedweight.runtime.frames import KV_OWNER, Arena, OutOfFrames, OwnerKind
from pagedweight.runtime.pager import Moves, Pager
from pagedweight.runtime.table import PageState, PageTable
from pagedweight.runtime.table_view import Transition
from tests.runtime.support import (
    FRAME_BYTES,
    CrankedEngine,
    ShortArena,
    TransferFault,
    assert_published,
    everything_at,
    host_has,
    tiny_model,
)


class Bench:
    """A pager on a cranked engine, every row placed at the floor."""

    def __init__(self, frames: int = 2000, arena: type[Arena] = Arena) -> None:
        self.model = tiny_model()
        self.arena = arena(frames * FRAME_BYTES, FRAME_BYTES)
        self.engine = CrankedEngine(self.arena)
        self.engine.model = self.model
        self.table = PageTable(self.model.layout, self.model.sizes, self.arena, self.engine.upload)
        self.pager = Pager(self.table, self.arena, self.model.host, self.engine)
        self.pager.start([self.move(row, 2) for row in range(self.model.layout.rows)])
        self.pager.settle()

    def move(self, row: int, bits: int) -> Transition:
        return Transition(row, int(self.table.committed[row]), bits, 0)

    def go(self, **bits_by_row: int) -> None:
        """One boundary's worth of transitions, named row3=4."""
        moves = [self.move(int(name.removeprefix("row")), bits) for name, bits in bits_by_row.items()]
        self.pager.collect()
        self.pager.raise_landed()
        self.pager.lower(moves)
        self.table.publish()
        self.pager.start(moves)

    def settle(self) -> None:
        self.pager.settle()
        self.check()
        owned = self.arena.bytes_by_owner()
        assert {name: owned[name] for name in ("plane", "table")} == everything_at(self.table)

    def check(self) -> None:
        self.arena.check()
        self.table.check()
        assert_published(self.model, self.table.tables, self.arena)


def test_a_reload_raises_only_after_everything_has_landed():
    bench = Bench()
    bench.go(row1=6)
    assert bench.table.tables.bits[1] == 2
    assert list(bench.table.state[1]) == [PageState.GPU] * 2 + [PageState.TO_GPU] * 4
    bench.go()
    assert bench.table.committed[1] == 2  # still not landed
    bench.engine.pending[0].turn()
    bench.go()
    assert bench.table.tables.bits[1] == 6
    bench.settle()


def test_an_offload_lowers_at_once_and_frees_after_the_last_reader():
    bench = Bench()
    bench.go(row1=6)
    bench.settle()
    bench.engine.launch_forward(bench.table.tables)  # reads six planes until its fence
    free = bench.arena.free_frames
    bench.go(row1=2)
    assert bench.table.tables.bits[1] == 2
    assert bench.arena.free_frames == free
    resident = bench.model.sizes.resident_bytes()[1]
    assert bench.pager.releasing_bytes == resident[-1] - resident[0]
    bench.engine.pending[0].turn()
    bench.go()
    assert (bench.arena.free_frames - free) * FRAME_BYTES == bench.pager.moves.released_bytes
    assert bench.pager.idle
    bench.check()


def test_lowering_writes_the_table_over_the_slot_and_keeps_its_address():
    bench = Bench()
    bench.go(row0=6, row2=6)
    bench.settle()
    address = int(bench.table.tables.table_address[2])
    bench.go(row0=2, row2=4)
    assert int(bench.table.tables.table_address[2]) == address
    bench.check()
    bench.settle()
    held = bench.arena.bytes_by_owner()["table"] // FRAME_BYTES
    floor_tables = int(bench.model.sizes.table_frames[:, 0].sum())
    assert held == floor_tables + bench.model.sizes.table_frames[2, 2]


def test_a_reloaded_page_is_bit_equal_also_after_its_frames_served_kv():
    bench = Bench()
    bench.go(**{f"row{row}": 6 for row in range(bench.model.layout.rows)})
    bench.settle()
    bench.go(**{f"row{row}": 2 for row in range(bench.model.layout.rows)})
    bench.settle()
    kv = bench.arena.allocate(bench.arena.free_frames, KV_OWNER)
    bench.arena.rows[torch.from_numpy(kv)] = 0xFF
    bench.arena.free(kv)
    bench.go(**{f"row{row}": 4 + 2 * (row % 2) for row in range(bench.model.layout.rows)})
    bench.settle()


def test_a_page_without_a_host_copy_is_written_back_before_its_frames_are_freed():
    bench = Bench()
    bench.go(row3=4)
    bench.settle()
    bench.model.host.forget(3, 2)
    free = bench.arena.free_frames
    bench.go(row3=2)
    fence, copy_out = bench.engine.pending
    fence.turn()
    bench.go()
    assert bench.arena.free_frames == free
    assert bench.model.host.page(3, 2) is None
    copy_out.turn()
    bench.go()
    assert bench.arena.free_frames > free
    assert host_has(bench.model, 3, 2)
    assert bench.pager.moves.written_back_bytes == bench.model.pages[3][2].size
    bench.go(row3=6)
    bench.settle()


def test_a_failed_write_back_keeps_the_only_copy_and_is_tried_again():
    bench = Bench()
    bench.go(row3=4)
    bench.settle()
    bench.model.host.forget(3, 2)
    bench.go(row3=2)
    fence, copy_out = bench.engine.pending
    fence.turn()
    copy_out.turn(fail=True)
    with pytest.raises(TransferFault):
        bench.go()
    assert bench.table.state[3, 2] == PageState.TO_CPU
    bench.table.check()
    room = bench.model.host.reserve(3, 2)
    bench.go()
    bench.settle()
    assert bench.model.host.page(3, 2) is room
    assert host_has(bench.model, 3, 2)


def test_without_a_fence_no_write_back_is_left_behind_to_end_after_its_frames_are_others():
    bench = Bench()
    bench.go(row3=4)
    bench.settle()
    bench.model.host.forget(3, 2)
    bench.engine.fail_next_fence = True
    with pytest.raises(TransferFault):
        bench.go(row3=2)
    assert not bench.engine.pending
    bench.go()
    bench.settle()
    assert host_has(bench.model, 3, 2)


def test_a_failed_reload_gives_everything_back_and_works_the_next_time():
    bench = Bench()
    free = bench.arena.free_frames
    bench.go(row1=6, row4=4)
    bench.engine.pending[0].turn(fail=True)
    with pytest.raises(TransferFault):
        bench.go()
    assert bench.arena.free_frames == free
    assert bench.pager.idle
    bench.check()
    bench.go(row1=6, row4=4)
    bench.settle()
    assert bench.table.committed[[1, 4]].tolist() == [6, 4]


def test_a_reload_that_cannot_be_launched_takes_nothing():
    bench = Bench()
    free = bench.arena.free_frames
    bench.engine.fail_next_launch = True
    with pytest.raises(TransferFault):
        bench.go(row1=6, row4=4)
    assert bench.arena.free_frames == free
    assert bench.pager.idle
    bench.check()
    bench.go(row1=6, row4=4)
    bench.settle()
    assert bench.table.committed[[1, 4]].tolist() == [6, 4]


def test_a_failed_table_write_drops_to_the_floor_which_needs_nothing():
    bench = Bench()
    bench.go(row2=6, row3=6)
    bench.settle()
    bench.engine.fail_next_write = True
    with pytest.raises(TransferFault):
        bench.go(row2=4, row3=3)
    assert bench.table.tables.bits[[2, 3]].tolist() == [2, 2]
    assert_published(bench.model, bench.table.tables, bench.arena)
    bench.go()
    bench.settle()


def test_rows_that_find_no_room_are_left_as_they_are():
    bench = Bench(frames=tiny_model().resident_frames(2) + 40)
    bench.go(**{f"row{row}": 6 for row in range(bench.model.layout.rows)})
    assert bench.pager.moves.deferred_rows > 0
    bench.settle()
    assert set(bench.table.committed.tolist()) == {2, 6}


def free_runs(bench: Bench, length: int) -> None:
    """KV takes all but runs of so many frames."""
    taken = bench.arena.allocate(bench.arena.free_frames, KV_OWNER)
    bench.arena.free(taken[np.arange(len(taken)) % (length + 1) != 0])


@pytest.fixture
def nothing_moves(monkeypatch):
    """As at a boundary that has cleared as many windows as it may."""
    monkeypatch.setattr("pagedweight.runtime.pager_room._MOST_WINDOWS", 0)


def test_a_raise_without_a_run_for_its_table_is_put_off(nothing_moves):
    bench = Bench()
    free_runs(bench, 1)
    free = bench.arena.free_frames
    bench.go(row6=6)  # its table of 3 bits takes three frames
    assert bench.pager.moves.deferred_rows == 1
    assert bench.arena.free_frames == free
    bench.check()


def test_a_row_rises_as_far_as_a_run_for_its_table_is_found(nothing_moves):
    bench = Bench()
    free_runs(bench, 3)
    bench.go(row1=6, row6=6, row7=6)  # tables of 1, 2, 8 frames; 3, 6, 24; and 2, 4, 16 at 3, 4 and 6 bits
    bench.settle()
    assert bench.table.committed[[1, 6, 7]].tolist() == [4, 3, 3]
    assert bench.pager.moves.deferred_rows == 0
    held = bench.arena.bytes_by_owner()
    assert held["plane"] + held["table"] == sum(everything_at(bench.table).values())


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]])
def test_rescue_drops_rows_in_order_and_no_more_than_needed(order):
    bench = Bench()
    bench.go(**{f"row{row}": 6 for row in range(5)})
    bench.settle()
    bench.engine.launch_forward(bench.table.tables)
    free = bench.pager.rescue(bench.arena.free_bytes + 1, order)
    assert free == bench.arena.free_bytes
    assert np.flatnonzero(bench.table.committed[:5] == 2).tolist() == order[:1]
    assert bench.pager.idle
    bench.check()


def test_rescue_takes_what_is_on_its_way_before_it_drops_anything():
    bench = Bench()
    bench.go(row0=6, row1=6)
    bench.settle()
    free = bench.arena.free_bytes
    bench.go(row0=4, row5=6)  # one release and one load in flight
    released = bench.pager.releasing_bytes
    bench.pager.rescue(free, range(bench.model.layout.rows))
    assert bench.table.committed[[0, 1, 5]].tolist() == [4, 6, 2]
    assert bench.pager.moves.cancelled_rows == 1
    assert bench.arena.free_bytes == free + released
    bench.check()


def test_rescue_says_what_it_got_when_there_is_no_more():
    bench = Bench()
    assert bench.pager.rescue(10**9, range(bench.model.layout.rows)) == bench.arena.free_bytes
    bench.check()


def test_case_81_a_row_named_twice_is_refused_before_anything_moves():
    bench = Bench()
    bench.go(row1=6)
    bench.settle()
    twice = [bench.move(1, 4), bench.move(1, 4)]
    with pytest.raises(ValueError, match="twice"):
        bench.pager.lower(twice)
    with pytest.raises(ValueError, match="plan again"):
        bench.pager.lower([Transition(1, 4, 3, 0)])
    bench.check()
    bench.go(row1=2)
    with pytest.raises(ValueError, match="plan again"):
        bench.pager.start([Transition(1, 6, 6, 0)])
    bench.settle()
    bench.go(row1=3, row2=3)
    first = np.flatnonzero((bench.arena.kinds == OwnerKind.PLANE) & (bench.arena.owner_rows == 1))
    second = bench.table.page_frames(2, 2)
    assert not set(first) & set(second)
    assert bench.arena.owner(first[0]).kind == OwnerKind.PLANE
    bench.settle()


def test_a_plan_for_a_row_in_transfer_is_refused():
    bench = Bench()
    bench.go(row1=6)
    with pytest.raises(ValueError, match="plan again"):
        bench.pager.start([bench.move(1, 4)])
    bench.settle()


def test_host_memory_that_runs_out_leaves_the_page_where_it_is(monkeypatch):
    bench = Bench()
    bench.go(row3=4)
    bench.settle()
    bench.model.host.forget(3, 3)
    with monkeypatch.context() as patch:
        patch.setattr(type(bench.model.host), "reserve", raise_memory_error)
        with pytest.raises(MemoryError):
            bench.go(row3=2)
    assert bench.table.tables.bits[3] == 2
    bench.table.check()
    bench.go()
    bench.settle()
    assert host_has(bench.model, 3, 3)


def raise_memory_error(*_args, **_kwargs):
    raise MemoryError("no host memory")


def test_pages_refused_after_their_tables_were_allocated_take_nothing_and_rise_the_next_time():
    """Three rows by three planes each: three tables, then one allocation for all the pages."""
    bench = Bench(arena=ShortArena)
    bench.go(row1=3, row6=3, row7=3)
    bench.settle()
    free = bench.arena.free_frames
    bench.arena.refused = 4
    with pytest.raises(OutOfFrames, match="refused"):
        bench.go(row1=6, row6=6, row7=6)
    assert bench.arena.free_frames == free
    assert bench.table.committed[[1, 6, 7]].tolist() == [3, 3, 3]
    bench.check()
    bench.go(row1=6, row6=6, row7=6)
    bench.settle()
    assert bench.table.committed[[1, 6, 7]].tolist() == [6, 6, 6]
    bench.check()


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_table_refused_once_among_three_rows_is_asked_for_again(refused):
    bench = Bench(arena=ShortArena)
    bench.arena.refused = refused
    bench.go(row1=6, row6=6, row7=6)
    bench.settle()
    assert bench.table.committed[[1, 6, 7]].tolist() == [6, 6, 6]
    bench.check()


def test_out_of_frames_is_an_ordinary_error():
    assert issubclass(OutOfFrames, RuntimeError)


def test_the_rate_is_0_before_a_page_has_come_back():
    assert Moves(*[0] * len(Moves._fields)).loaded_bytes_per_second == 0
