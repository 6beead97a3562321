"""Weights as a tenant of a block pool: a whole engine in small, whose ranks do what the commands say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.integrations.vllm.block_planner import BlockPlanner
from pagedweight.integrations.vllm.commands import StepCommands
from pagedweight.integrations.vllm.frame_copies import HostFrameCopies
from pagedweight.integrations.vllm.kv_frames import BlockFrames
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.page_source import draw_block
from pagedweight.integrations.vllm.rank_pager import RankPager
from pagedweight.integrations.vllm.resident import ResidentWeights
from pagedweight.integrations.vllm.tenancy import Tenancy
from pagedweight.integrations.vllm.tenant import Tenant
from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy
from pagedweight.runtime.pages import HostPages, PageSizes

LAYOUT = Layout(
    (MoeLayer(1, 4, 64, 48), MoeLayer(3, 4, 64, 48)),
    (2, 3, 4, 6),
    {2: "lut16", 3: "lut8", 4: "lut16", 6: "affine"},
)
FRAME_BYTES = 256
POISON = 0xA5


class SmallPool:
    """Block ids; the KV cache writes into each block that it gets."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(1, blocks))
        self.total = blocks - 1
        self.cache: list[int] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> np.ndarray:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "more blocks taken than are free"
        return np.array(taken, dtype=np.int64)

    def give(self, block_ids: np.ndarray) -> None:
        self._free += block_ids.tolist()

    def grow(self, count: int) -> bool:
        if count > len(self._free):
            return False
        self.cache += self.take(count).tolist()
        return True

    def shrink(self) -> None:
        self._free += self.cache
        self.cache = []


class Rank:
    """A rank over a KV cache of one tensor."""

    def __init__(self, blocks: int) -> None:
        self.kv = torch.zeros(blocks, 2048, dtype=torch.uint8)
        self.weights = ResidentWeights(LAYOUT, LAYOUT.floor_width, FRAME_BYTES, torch.device("cpu"))
        self.host = HostPages(PageSizes.of(LAYOUT, self.weights.plane_frames, FRAME_BYTES))
        for row, (height, columns) in enumerate(LAYOUT.row_shapes()):
            packed = draw_block(height, columns, LAYOUT.widths, LAYOUT.codebooks)
            packed = packed._replace(planes=packed.planes ^ row)
            pages = self.weights.put(row, packed)
            for plane in range(LAYOUT.floor_width, LAYOUT.parent_width):
                self.host.store(row, plane, pages[plane])
            for bits in self.weights.upper_widths:
                self.host.store_table(row, bits, packed.tables[bits])
        self.frames = BlockFrames([self.kv], blocks, FRAME_BYTES)
        self.pager = RankPager(self.weights, self.host, self.frames, HostFrameCopies(FRAME_BYTES))


class NotedCopies(HostFrameCopies):
    """Says in which order it was called."""

    def __init__(self, frame_bytes: int, done: list[str]) -> None:
        super().__init__(frame_bytes)
        self._done = done

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        self._done.append("move")
        super().move(source, target)

    def join(self) -> None:
        self._done.append("join")


class Engine:
    def __init__(self, blocks: int, ranks: int = 1, **options: int) -> None:
        chosen = ServingOptions(**{"offload_free_blocks": 1, "reload_free_blocks": 3, "min_dwell_steps": 1, **options})
        self.pool = SmallPool(blocks)
        self.ranks = [Rank(blocks) for _ in range(ranks)]
        first = self.ranks[0]
        s_bar = 4.0 ** -np.array(LAYOUT.widths) * np.random.default_rng(0).lognormal(size=(LAYOUT.rows, 1))
        policy = Policy.from_sensitivity(LAYOUT, s_bar, np.full(LAYOUT.rows, 0.25))
        tenancy = Tenancy(first.weights.plane_frames, LAYOUT.parent_width, 2, first.frames.per_block)
        self.tenant = Tenant(BlockPlanner(LAYOUT, policy, tenancy, FRAME_BYTES, chosen), self.pool, chosen)
        for commands in self.tenant.settle_in():
            self._carry_out(commands)

    @property
    def bits(self) -> np.ndarray:
        return self.ranks[0].weights.tables.bits.numpy()

    @property
    def held(self) -> int:
        return len(self.tenant.planner.tenancy.blocks)

    def step(self, wanted: int = 0) -> bool:
        """One scheduling step that needs `wanted` more blocks; whether it got them."""
        self.tenant.begin_step(wanted)
        tries, found = 1, self.pool.grow(wanted)
        while not found and self.tenant.rescue(tries):
            tries, found = 2 * tries, self.pool.grow(wanted)
        self._carry_out(self.tenant.end_step())
        for rank in self.ranks:
            rank.kv[self.pool.cache] = POISON  # what the forward writes into its blocks
        self.check()
        return found

    def check(self) -> None:
        tenancy = self.tenant.planner.tenancy
        tenancy.check()
        assert self.pool.free_blocks + len(self.pool.cache) + self.held == self.pool.total
        for rank in self.ranks:
            # Named first: a failing assert prints what it names, and tables hold all of memory.
            bits = rank.weights.tables.bits.numpy()
            assert (bits == tenancy.width).all()
            rank.pager.check()

    def _carry_out(self, commands: StepCommands) -> None:
        for rank in self.ranks:
            rank.pager.carry_out(commands)


def test_weights_start_as_high_as_the_pool_allows() -> None:
    roomy, tight = Engine(200), Engine(8)
    assert (roomy.bits == 6).all()
    assert (tight.bits < 6).any()
    assert tight.pool.free_blocks > 3


def test_bits_fall_as_the_cache_grows_and_return_when_it_shrinks() -> None:
    engine = Engine(40)
    start = engine.bits.mean()
    while engine.step(1):
        pass
    assert (engine.bits == LAYOUT.floor_width).all(), "a request would be preempted while weights hold blocks"
    assert engine.held == 0
    engine.pool.shrink()
    for _ in range(40):
        engine.step()
    assert engine.bits.mean() == start


def test_precision_has_a_name_for_each_spell_below_the_parent_width() -> None:
    engine = Engine(200)
    names = [engine.tenant.precision]
    for _ in range(2):
        engine.step(engine.pool.free_blocks)
        names.append(engine.tenant.precision)
        engine.pool.shrink()
        for _ in range(40):
            engine.step()
        names.append(engine.tenant.precision)
    assert names == ["", "1", "", "2", ""]


def test_what_is_asked_at_once_is_had_in_the_same_step() -> None:
    engine = Engine(40)
    assert engine.held > 10
    assert engine.step(engine.pool.free_blocks + 10)


def test_loads_on_their_way_are_abandoned_before_a_request_is_preempted() -> None:
    engine = Engine(40, settle_steps=1000, reload_blocks=64)
    while engine.step(1):
        pass
    engine.pool.shrink()
    engine.step()
    assert len(engine.tenant.planner.tenancy.loading)
    assert engine.step(engine.pool.total), "the whole pool belongs to requests, if they need it"


def test_what_has_just_come_may_be_given_up_in_the_same_step() -> None:
    engine = Engine(60, settle_steps=1, reload_blocks=64)
    engine.step(engine.pool.total)
    engine.pool.shrink()
    engine.step()
    assert len(engine.tenant.planner.tenancy.loading)
    assert engine.step(engine.pool.total)
    assert engine.tenant.counts.raised
    assert (engine.bits == LAYOUT.floor_width).all()


def test_blocks_whose_load_is_abandoned_in_its_own_step_are_not_loaded_into() -> None:
    engine = Engine(60, settle_steps=2, reload_blocks=64)
    engine.step(engine.pool.total)
    engine.pool.shrink()
    engine.tenant.begin_step(0)
    assert len(engine.tenant.planner.tenancy.loading)
    while engine.tenant.rescue(64):
        pass
    assert engine.held == 0
    assert not engine.tenant.end_step().loads


def test_frames_on_their_way_come_before_anything_moves() -> None:
    """On a GPU a copy that is still on its way could land on a frame that was moved where it goes."""
    engine = Engine(60, settle_steps=1, reload_blocks=64)
    engine.step(engine.pool.total)
    engine.pool.shrink()
    engine.step()
    engine.tenant.begin_step(engine.pool.free_blocks + 3)
    commands, done = engine.tenant.end_step(), []
    assert any(moves.frames for _, moves in commands.rounds)
    pager = engine.ranks[0].pager
    pager._copies = NotedCopies(FRAME_BYTES, done)
    pager.carry_out(commands)
    assert done.index("join") < done.index("move")


def test_case_99_ranks_do_the_same_at_every_step() -> None:
    engine = Engine(40, ranks=2)
    for wanted in [5, 5, 5, 5, 0, 0]:
        engine.step(wanted)
        first, second = (rank.weights.tables.bits.tolist() for rank in engine.ranks)
        assert first == second
        assert torch.equal(engine.ranks[0].kv, engine.ranks[1].kv)


@given(st.lists(st.one_of(st.integers(0, 12), st.just("shrink")), max_size=25), st.integers(6, 60), st.integers(1, 4))
def test_any_traffic_keeps_every_plane_in_use_right(traffic: list, blocks: int, settle_steps: int) -> None:
    engine = Engine(blocks, settle_steps=settle_steps)
    for wanted in traffic:
        if wanted == "shrink":
            engine.pool.shrink()
            engine.step()
        else:
            found = engine.step(wanted)
            assert found or (engine.held == 0 and wanted > engine.pool.free_blocks)


def test_case_90_a_pool_that_swings_about_the_threshold_moves_little() -> None:
    engine = Engine(40, min_dwell_steps=4)
    while engine.pool.free_blocks > 2:
        engine.step(1)
    before = engine.tenant.counts
    for turn in range(100):
        if turn % 2:
            engine.pool.give(np.array([engine.pool.cache.pop()]))
            engine.step()
        else:
            engine.step(1)
    assert engine.tenant.counts.blocks_given - before.blocks_given <= 4


def test_case_84_blocks_that_another_takes_meanwhile_are_had_after_few_tries() -> None:
    engine = Engine(60)
    engine.tenant.begin_step(3)
    assert engine.pool.grow(engine.pool.free_blocks), "another request takes all that was seen to be free"
    tries = 0
    while not engine.pool.grow(15):
        assert engine.tenant.rescue(2**tries)
        tries += 1
    assert tries <= 5


def test_case_88_what_cannot_be_had_is_tried_once_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(30)
    with caplog.at_level("INFO", "vllm.pagedweight"):
        for _ in range(1000):
            engine.tenant.begin_step(10 * engine.pool.total)
            engine._carry_out(engine.tenant.end_step())
    assert (engine.bits == LAYOUT.floor_width).all()
    assert engine.tenant.shortfall_bytes > 0
    given = engine.tenant.counts
    engine.tenant.begin_step(10 * engine.pool.total)
    assert engine.tenant.counts == given
    assert 1 <= len(caplog.records) <= 2


def test_a_plane_that_is_wrong_is_found() -> None:
    """The check above can fail."""
    engine = Engine(40)
    engine.ranks[0].kv[engine.tenant.planner.tenancy.blocks[0], 0] ^= 1
    with pytest.raises(AssertionError):
        engine.check()
