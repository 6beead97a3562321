"""Any order of moves, forwards, failures, KV allocations and rescues keeps the table, the arena and the bytes true."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedweight.runtime.frames import KV_OWNER, OutOfFrames, OwnerKind
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.pages import HostPages
from pagedweight.runtime.table import PageState, PageTable
from pagedweight.runtime.table_view import Transition
from tests.runtime.support import (
    FAULTS,
    FRAME_BYTES,
    CrankedEngine,
    ShortArena,
    ShortHostPages,
    assert_published,
    everything_at,
    host_has,
    tiny_model,
)

WIDTHS = (2, 3, 4, 6)
ROWS = 10


class PagerMachine(RuleBasedStateMachine):
    @initialize(
        spare_frames=st.integers(0, 220),
        bits=st.lists(st.sampled_from(WIDTHS), min_size=ROWS, max_size=ROWS),
        kv_moves=st.booleans(),
    )
    def place(self, spare_frames, bits, kv_moves):
        self.model = tiny_model(widths=WIDTHS, host_pages=ShortHostPages)
        self.arena = ShortArena((self.model.resident_frames(2) + spare_frames) * FRAME_BYTES, FRAME_BYTES)
        self.arena.memory.fill_(0xA5)
        self.engine = CrankedEngine(self.arena)
        self.engine.model = self.model
        self.table = PageTable(self.model.layout, self.model.sizes, self.arena, self.engine.upload)
        self.pager = Pager(self.table, self.arena, self.model.host, self.engine)
        self.kv: list[np.ndarray] = []
        if kv_moves:
            self.pager.follow_kv(self.kv_moved)
        self.poison = itertools.count(1)
        self.pager.start([Transition(row, 0, 2, 0) for row in range(ROWS)])
        self.pager.settle()
        assert (self.table.committed == 2).all()
        self.boundary(dict(enumerate(bits)))
        self.pager.settle()
        self.engine.launch_forward(self.table.tables)

    def kv_moved(self, sources, targets):
        """A holder of KV that follows its frames."""
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        self.kv = [np.array([moved.pop(frame, frame) for frame in frames.tolist()]) for frames in self.kv]
        assert not moved, "frames of nobody"

    @rule(wanted=st.dictionaries(st.integers(0, ROWS - 1), st.sampled_from(WIDTHS), max_size=ROWS))
    def boundary(self, wanted):
        try:
            self.pager.collect()
            self.pager.raise_landed()
            moves = self.moves(wanted)
            self.pager.lower(moves)
            self.table.publish()
            free = self.arena.free_frames
            self.pager.start(moves)
            # An offload is visible at once and frees nothing yet; a reload takes frames and is not visible yet.
            for move in moves:
                assert self.table.tables.bits[move.row] == min(move.from_bits, move.to_bits)
            assert self.arena.free_frames <= free
            self.engine.launch_forward(self.table.tables)
        except FAULTS:
            assert (self.table.committed >= 2).all()

    @rule(bits=st.sampled_from(WIDTHS))
    def boundary_for_all(self, bits):
        self.boundary(dict.fromkeys(range(ROWS), bits))

    @precondition(lambda self: self.engine.pending)
    @rule(data=st.data(), fail=st.booleans())
    def turn(self, data, fail):
        ticket = data.draw(st.sampled_from(self.engine.pending), label="ticket")
        ticket.turn(fail=fail and ticket.moves_bytes)

    @rule()
    def next_table_write_or_relocation_fails(self):
        self.engine.fail_next_write = True

    @rule()
    def next_copy_in_is_not_launched(self):
        self.engine.fail_next_launch = True

    @rule(later=st.integers(1, 3))
    def an_allocation_is_refused(self, later):
        self.arena.refused = later

    @rule()
    def host_memory_is_short(self):
        self.model.host.short = True

    @rule(row=st.integers(0, ROWS - 1), plane=st.integers(2, 5))
    def forget_host_copy(self, row, plane):
        """Only of a page that is on the device, where it then is the only copy."""
        if self.table.state[row, plane] == PageState.GPU and self.model.host.page(row, plane) is not None:
            self.model.host.forget(row, plane)
            HostPages.reserve(self.model.host, row, plane).fill_(0)

    @rule(count=st.integers(1, 12), contiguous=st.booleans())
    def allocate_kv(self, count, contiguous):
        try:
            if contiguous:
                first = self.arena.allocate_run(count, KV_OWNER)
                frames = np.arange(first, first + count)
            else:
                frames = self.arena.allocate(count, KV_OWNER)
        except OutOfFrames:
            return
        self.arena.rows[torch.from_numpy(frames)] = next(self.poison) % 256
        self.kv.append(frames)

    @rule(apart=st.integers(2, 6))
    def scatter_kv(self, apart):
        """KV takes every free frame, then leaves holes: tables find no run unless frames move."""
        frames = self.arena.highest_free(self.arena.free_frames)
        if len(frames):
            self.allocate_kv(len(frames), contiguous=False)
        if len(frames) and self.kv and len(self.kv[-1]) == len(frames):
            every = self.kv.pop()
            self.kv.append(every[::apart])
            self.arena.free(np.setdiff1d(every, every[::apart]))

    @precondition(lambda self: self.kv)
    @rule(at=st.integers(0, 100))
    def free_kv(self, at):
        self.arena.free(self.kv.pop(at % len(self.kv)))

    @rule(frames=st.integers(0, 300), order=st.permutations(range(ROWS)))
    def rescue(self, frames, order):
        try:
            free = self.pager.rescue(frames * FRAME_BYTES, order)
        except FAULTS:
            return
        assert free == self.arena.free_bytes
        if free < frames * FRAME_BYTES:
            assert (self.table.committed == 2).all()
            assert self.pager.idle

    @rule()
    def settle(self):
        """Once everything has been collected, each owner holds what the committed widths say, to the byte."""
        while not self.pager.idle:
            try:
                self.pager.settle()
            except FAULTS:
                self.table.publish()
        self.table.publish()
        owned = self.arena.bytes_by_owner()
        assert {name: owned[name] for name in ("plane", "table")} == everything_at(self.table)
        assert (self.table.desired == self.table.committed).all()

    @invariant()
    def table_and_arena_are_true(self):
        """And whatever is free holds garbage, which a forward that still reads there would find."""
        if not hasattr(self, "table"):
            return
        self.arena.check()
        self.table.check()
        owned = self.arena.bytes_by_owner()
        assert owned["kv"] == sum(map(len, self.kv)) * FRAME_BYTES
        assert owned["plane"] == int((self.table.frames >= 0).sum()) * FRAME_BYTES
        assert all(self.arena.are_owned_by(frames, KV_OWNER) for frames in self.kv)
        self.arena.rows[torch.from_numpy(self.arena.kinds == OwnerKind.FREE)] = next(self.poison) % 256

    @invariant()
    def kernels_see_only_what_is_there(self):
        """Whatever has happened since the last publish, what is published can be read."""
        if hasattr(self, "table"):
            assert_published(self.model, self.table.tables, self.arena)

    @invariant()
    def no_page_is_lost(self):
        if hasattr(self, "table"):
            for row, plane in zip(*np.nonzero(self.table.state == PageState.CPU), strict=True):
                assert host_has(self.model, int(row), int(plane)), (row, plane)

    def teardown(self):
        if hasattr(self, "table"):
            self.settle()
            self.engine.close()
            event(f"relocated: {self.pager.moves.relocated_bytes > 0}")
            self.table_and_arena_are_true()
            self.kernels_see_only_what_is_there()

    def moves(self, wanted: dict[int, int]) -> list[Transition]:
        busy, committed = self.table.busy(), self.table.committed
        return [
            Transition(row, int(committed[row]), bits, 0)
            for row, bits in wanted.items()
            if not busy[row] and bits != committed[row]
        ]


# 120 programs of up to 40 steps: 4,800 steps of offload, reload, relocation, commit and failure (case 79).
TestCase79PagerMachine = PagerMachine.TestCase
TestCase79PagerMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],  # shrinking such programs takes minutes; remove this line to debug
)
