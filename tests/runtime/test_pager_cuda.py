"""The state machine on real streams: nothing waits between steps, and late forwards check every byte."""

import numpy as np
import pytest
import torch

from pagedweight.runtime.frames import KV_OWNER, Arena, OutOfFrames, OwnerKind
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.pages import HostPages, PageSizes
from pagedweight.runtime.table import PageState, PageTable
from pagedweight.runtime.table_view import Transition
from pagedweight.runtime.transfer import FrameCopy, Ticket
from pagedweight.runtime.transfer_cuda import CudaEngine
from tests.runtime.support import TransferFault
from tests.runtime.test_controller_cuda import FRAME_BYTES, FRAMES_PER_PLANE, LAYOUT, WIDTHS, LateReader

pytestmark = pytest.mark.gpu

ROWS = LAYOUT.rows
PER_ROW = FRAMES_PER_PLANE * 6


class FaultyEngine(CudaEngine):
    """Fails half way through the next copy in, the next table write or the next relocation when it is told so."""

    fault = ""

    def copy_in(self, copies: list[FrameCopy]) -> Ticket:
        ticket = super().copy_in(copies[: len(copies) // 2] if self.fault == "copy_in" else copies)
        self._fail("copy_in", ticket)
        return ticket

    def write_now(self, copies: list[FrameCopy]) -> None:
        super().write_now(copies)
        if copies:
            self._fail("write_now", self.fence())

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self._fail("relocate", self.fence())
        super().relocate(sources, targets)

    def _fail(self, where: str, ticket: Ticket) -> None:
        if self.fault == where:
            self.fault = ""
            ticket.wait()  # what has raised is settled
            raise TransferFault(where)


class Machine:
    """One step after another on the compute stream, chosen at random."""

    def __init__(self, seed: int, spare_frames: int, copy_streams: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.host = drawn_pages()
        floor_frames = int(self.host.sizes.resident_bytes()[:, 0].sum()) // FRAME_BYTES
        self.arena = Arena((floor_frames + spare_frames) * FRAME_BYTES, FRAME_BYTES, "cuda")
        self.arena.memory.fill_(0xFF)
        self.engine = FaultyEngine(self.arena, copy_streams=copy_streams)
        self.table = PageTable(LAYOUT, self.host.sizes, self.arena, self.engine.upload)
        self.pager = Pager(self.table, self.arena, self.host, self.engine)
        self.pager.follow_kv(self.kv_moved)
        self.kv: list[tuple[np.ndarray, int]] = []
        self.faults = 0
        self.pager.start([Transition(row, 0, 2, 0) for row in range(ROWS)])
        self.pager.settle()
        self.reader = LateReader(self.host, self.table.tables)

    def kv_moved(self, sources: np.ndarray, targets: np.ndarray) -> None:
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        self.kv = [
            (np.array([moved.get(f, f) for f in frames.tolist()], dtype=np.int64), value) for frames, value in self.kv
        ]

    def step(self) -> None:
        try:
            self.rng.choice([self.boundary, self.take_kv, self.crowd, self.end_kv, self.rescue, self.break_next])()
        except TransferFault:
            self.faults += 1
            self.table.publish()
        self.poison_free_frames()
        self.reader.forward()

    def boundary(self) -> None:
        self.pager.collect()
        self.pager.raise_landed()
        busy, committed = self.table.busy(), self.table.committed
        rows = [row for row in self.rng.permutation(ROWS)[:8].tolist() if not busy[row]]
        wanted = zip(rows, self.rng.choice(WIDTHS, len(rows)).tolist(), strict=True)
        moves = [Transition(row, int(committed[row]), bits, 0) for row, bits in wanted if bits != committed[row]]
        self.pager.lower(moves)
        self.table.publish()
        self.pager.start(moves)

    def take_kv(self) -> None:
        count = int(self.rng.integers(1, 40))
        try:
            self.hold(self.arena.allocate(count, KV_OWNER))
        except OutOfFrames:
            assert count > self.arena.free_frames

    def crowd(self) -> None:
        """KV takes every free frame and gives every second one back: no table finds neighbours unless frames move."""
        frames = self.arena.allocate(self.arena.free_frames, KV_OWNER)
        kept = np.arange(len(frames)) % 2 == 0
        self.arena.free(frames[~kept])
        self.hold(frames[kept])
        self.boundary()

    def hold(self, frames: np.ndarray) -> None:
        value = int(self.rng.integers(0, 255))
        self.kv.append((frames, value))
        self.fill(frames, value)

    def end_kv(self) -> None:
        for _ in range(min(3, len(self.kv))):
            self.arena.free(self.kv.pop(int(self.rng.integers(len(self.kv))))[0])

    def rescue(self) -> None:
        wanted = int(self.rng.integers(0, 200)) * FRAME_BYTES
        assert self.pager.rescue(wanted, self.rng.permutation(ROWS)) == self.arena.free_bytes

    def break_next(self) -> None:
        self.engine.fault = str(self.rng.choice(["copy_in", "write_now", "relocate"]))

    def poison_free_frames(self) -> None:
        self.fill(np.flatnonzero(self.arena.kinds == OwnerKind.FREE), 0xFF)

    def fill(self, frames: np.ndarray, value: int) -> None:
        self.arena.rows[torch.from_numpy(frames).pin_memory().cuda(non_blocking=True)] = value

    def settle_and_check(self) -> None:
        self.engine.fault = ""
        self.pager.settle()
        self.arena.check()
        self.table.check()
        assert not (self.table.state == PageState.TO_CPU).any()
        assert int(self.reader.errors) == 0
        rows = self.arena.rows.cpu()
        assert all((rows[torch.from_numpy(frames)] == value).all() for frames, value in self.kv)
        held = self.table.snapshot()
        weights = int(held.bytes[np.arange(ROWS), self.table.width_index(held.committed)].sum())
        owned = self.arena.bytes_by_owner()
        assert owned["plane"] + owned["table"] == weights
        assert owned["kv"] == sum(len(frames) for frames, _ in self.kv) * FRAME_BYTES


def drawn_pages() -> HostPages:
    sizes = PageSizes.of(LAYOUT, np.full(ROWS, FRAMES_PER_PLANE), FRAME_BYTES)
    host = HostPages(sizes, None)
    for row, (n, _) in enumerate(LAYOUT.row_shapes()):
        for plane in range(6):
            host.store(row, plane, torch.randint(0, 256, (FRAMES_PER_PLANE * FRAME_BYTES,), dtype=torch.uint8))
        for width in WIDTHS:
            host.store_table(row, width, torch.randn(n, 2**width).half())
    return host


@pytest.mark.parametrize(("seed", "steps"), [(0, 1000), (1, 1000), (2, 100)], ids=["first", "second", "short"])
def test_case_72_and_79_any_order_of_moves_on_real_streams_leaves_every_byte_right(seed: int, steps: int) -> None:
    """The short one is for compute-sanitizer, under which a step takes a second."""
    machine = Machine(seed, spare_frames=ROWS * PER_ROW // 3, copy_streams=1 + seed % 2)
    reserved, allocated = [], []
    for number in range(steps):
        machine.step()
        if number % (steps // 10) == steps // 10 - 1:
            machine.settle_and_check()
            reserved.append(torch.cuda.memory_reserved())
            allocated.append(torch.cuda.memory_allocated())
    moves = machine.pager.moves
    assert min(moves.lowered_rows, moves.raised_rows) > steps // 5, moves
    assert moves.relocated_bytes > 0, moves
    assert machine.faults > steps // 200
    # This process asks nothing of the driver while pages move, once temporary tensors have been as large as they get.
    assert steps < 1000 or len(set(allocated[5:])) == len(set(reserved[5:])) == 1, (allocated, reserved)
    machine.engine.close()
