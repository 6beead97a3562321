import numpy as np
import pytest
import torch

from pagedweight.runtime.frames import Arena, Owner, OwnerKind
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import Transition
from tests.runtime.support import FRAME_BYTES, tiny_model

FLOOR = 2


@pytest.fixture
def table() -> PageTable:
    """Every row at the floor, by the table's own verbs and no pager."""
    model = tiny_model()
    table = PageTable(model.layout, model.sizes, Arena(2000 * FRAME_BYTES, FRAME_BYTES), torch.from_numpy)
    for row in range(model.layout.rows):
        raise_row(table, row, FLOOR)
    table.publish()
    return table


def bring_in(table: PageTable, row: int, bits: int) -> None:
    pages = bits - int(table.committed[row])
    frames = table._arena.allocate(pages * int(table.sizes.plane_frames[row]), Owner(OwnerKind.PLANE, row))
    run = table._arena.allocate_run(int(table.table_frames(row, bits)), Owner(OwnerKind.TABLE, row))
    table.want(np.array([row]), np.array([bits]))
    table.begin_move_in(np.array([row]), frames, np.array([run]))


def raise_row(table: PageTable, row: int, bits: int) -> np.ndarray:
    bring_in(table, row, bits)
    table.end_move(np.array([row]))
    return table.commit_raise(np.array([row]))


def test_nothing_is_visible_before_publish_and_only_changed_rows_after(table):
    before = table.tables.frame_address.clone()
    raise_row(table, 3, 4)
    assert not table.published
    assert table.tables.bits[3] == FLOOR
    table.publish()
    assert table.published
    assert table.tables.bits.tolist() == [4 if row == 3 else FLOOR for row in range(10)]
    changed = (table.tables.frame_address != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [3]
    table.check()


def test_planes_that_are_not_there_have_the_null_address(table):
    assert (table.tables.frame_address[:, FLOOR:] == 0).all()
    assert (table.tables.frame_address[:, :FLOOR, 0] % 128 == 0).all()
    assert (table.tables.frame_address[:, :FLOOR, 0] > 0).all()


def test_pages_cannot_be_committed_before_they_have_landed(table):
    bring_in(table, 1, 4)
    with pytest.raises(AssertionError):
        table.commit_raise(np.array([1]))
    with pytest.raises(AssertionError):
        table.want(np.array([1]), np.array([3]))  # in transfer
    assert table.busy().tolist() == [row == 1 for row in range(10)]


def test_pages_that_will_not_come_give_back_every_frame(table):
    free = table._arena.free_frames
    bring_in(table, 1, 6)
    table._arena.free(table.end_move(np.array([1]), landed=False))
    assert table._arena.free_frames == free
    assert (table.desired == table.committed).all()
    table.check()


def test_lowering_keeps_frames_until_the_move_ends(table):
    raise_row(table, 8, 6)
    table.publish()
    row = np.array([8])
    table.want(row, np.array([3]))
    unused = table.commit_lower(row)
    table.begin_move_out(row)
    table.publish()
    assert len(unused) == table.table_frames(8, 6) - table.table_frames(8, 3)
    assert (table.page_frames(8, 5) >= 0).all()
    table.check()
    freed = table.end_move(row)
    assert len(freed) == 3 * table.sizes.plane_frames[8]
    table._arena.free(np.concatenate([freed, unused]))
    table.check()


def test_a_snapshot_is_a_value(table):
    seen = table.snapshot()
    table.advance()
    raise_row(table, 0, 6)
    assert seen.committed[0] == FLOOR
    later = table.snapshot()
    assert later.committed[0] == 6
    assert later.since[0] == 0
    assert (later.since[1:] == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        later.bytes[0, 0] = 1


def test_rows_are_named_by_layer_index_expert_and_projection(table):
    seen = table.snapshot()
    assert seen.layer.tolist() == [0] * 6 + [1] * 4
    assert seen.expert.tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert seen.projection.tolist() == [0, 1] * 5


def test_check_finds_a_frame_that_another_owner_holds(table):
    table.frames[0, 0, 0] = table.frames[1, 0, 0]
    with pytest.raises(AssertionError):
        table.check()


def test_transitions_know_their_direction():
    assert Transition(0, 4, 2, 10).lowers
    assert not Transition(0, 2, 4, 10).lowers
