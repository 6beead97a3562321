"""Any order of forwards, sequences, moves and faults keeps widths, bytes and cached tokens true: the whole runtime.

Runtime, planner, page table, arena and transformers' cache, with copies and plans that finish when the machine says so
and faults at every seam: allocations, copies, their events, table writes, relocations, host memory, the gauge and what
it told long ago, the planner's thread and that there is none, statistics, the clock.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import Gemma3TextConfig

from pagedweight.integrations.hf_cache import ArenaCache
from pagedweight.integrations.kv_pool import FrameHoldings, KVPool, SlabShape
from pagedweight.layout import RoutingStats
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.controller_pace import Pace
from pagedweight.runtime.frames import OwnerKind
from pagedweight.runtime.kv import ArenaGauge, KVState
from pagedweight.runtime.pages import HostPages
from pagedweight.runtime.table import PageState
from tests.runtime.support import (
    FAULTS,
    FRAME_BYTES,
    CrankedEngine,
    ShortArena,
    ShortHostPages,
    assert_published,
    host_has,
    random_policy,
    tiny_model,
)

WIDTHS = (2, 3, 4, 6)
WINDOW = 5
HEADS, HEAD_DIM = 1, 8
CONFIG = Gemma3TextConfig(
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=WINDOW,
    hidden_size=8,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    head_dim=HEAD_DIM,
)
LAYERS = 2


SELDOM = st.integers(0, 4).map(lambda drawn: drawn == 4)


class PlanFault(RuntimeError):
    """What a planner's thread that died leaves behind."""


class GaugeFault(RuntimeError):
    """What a gauge that cannot be read raises."""


EXPECTED = (*FAULTS, PlanFault, GaugeFault)


class CrankedPlan:
    """A planner call on its way; finished by the machine, or by whoever waits for it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._answer: object = None
        self.failed = self.finished = False

    def done(self) -> bool:
        return self.finished

    def result(self) -> object:
        if not self.finished:
            self.turn()
        if self.failed:
            raise PlanFault("the planner's thread died")
        return self._answer

    def turn(self, *, fail: bool = False) -> None:
        self.finished, self.failed = True, fail
        if not fail:
            self._answer = self._call()


class CrankedThreads:
    """Stands for the planner's pool of one thread."""

    fails = False

    def __init__(self) -> None:
        self.plan: CrankedPlan | None = None

    def submit(self, call: Callable[[], object]) -> CrankedPlan:
        if self.fails:
            self.fails = False
            raise PlanFault("the system has no thread for the planner")
        self.plan = CrankedPlan(call)
        return self.plan

    def shutdown(self) -> None:
        return None


class FaultyGauge(ArenaGauge):
    """Cannot be read, or tells for some readings what it told before."""

    fails = False
    stale_readings = 0
    told: KVState | None = None

    def read(self) -> KVState:
        if self.fails:
            self.fails = False
            raise GaugeFault("the gauge cannot be read")
        if self.stale_readings and self.told is not None:
            self.stale_readings -= 1
        else:
            self.told = super().read()
        return self.told


class Sequences:
    """A batch in a cache and what must be in it: keys, the values being their negatives. (B, heads, S, head_dim)."""

    def __init__(self, cache: ArenaCache, batch: int) -> None:
        self.cache = cache
        self.batch = batch
        self.truth = [torch.empty(batch, HEADS, 0, HEAD_DIM) for _ in range(LAYERS)]

    def forward(self, keys: torch.Tensor) -> None:
        """Every layer stores its keys and sees its own past: all of it, or its window."""
        for layer in range(LAYERS):
            states = keys + layer
            past = self.truth[layer]
            if layer == 0:
                past = past[:, :, max(0, past.shape[2] - (WINDOW - 1)) :]
            seen = self.cache.update(states, -states, layer)
            expected = torch.cat([past, states], dim=2)
            assert torch.equal(seen[0], expected)
            assert torch.equal(seen[1], -expected)
            self.truth[layer] = torch.cat([self.truth[layer], states], dim=2)


class RuntimeMachine(RuleBasedStateMachine):
    @initialize(
        spare_frames=st.integers(0, 400), background=st.booleans(), kv_moves=st.booleans(), bits=st.sampled_from(WIDTHS)
    )
    def place(self, spare_frames, background, kv_moves, bits):
        self.model = tiny_model(widths=WIDTHS, host_pages=ShortHostPages)
        layout = self.model.layout
        self.arena = ShortArena((self.model.resident_frames(2) + 24 + spare_frames) * FRAME_BYTES, FRAME_BYTES)
        self.arena.memory.fill_(0xA5)
        self.engine = CrankedEngine(self.arena)
        self.engine.model = self.model
        self.pool = KVPool(self.arena, [(SlabShape(HEADS, HEAD_DIM, torch.float32),) * 2] * LAYERS, block_tokens=4)
        self.gauge = FaultyGauge(self.arena, self.pool.block_frames)
        self.stats = RoutingStats.zeros(3, len(layout.moe_layers), 3)
        config = RuntimeConfig(
            offload_free_blocks=2,
            reload_free_blocks=4,
            min_dwell_steps=1,
            plan_period_steps=2,
            max_requests=3,
            background_rows=0 if background else 10**9,
        )
        parts = layout, self.model.host, self.arena, random_policy(layout), config, self.engine, self.gauge, self.stats
        self.runtime = Runtime(*parts)
        self.threads = self.runtime._planning._worker._threads = CrankedThreads()
        self.runtime._planning._raises._pace = self.pace = Pace(timed=False)  # the machine says how long steps take
        self.table = self.runtime._table
        self.pool.draw_on(self.runtime)
        if kv_moves:
            self.runtime.follow_kv(self.pool.follow)
        self.running: list[Sequences] = []
        self.others: list[FrameHoldings] = []
        self.poison, self.keys = itertools.count(1), itertools.count(1)
        self.pauses = 0
        self.broken = {PlanFault: 0, GaugeFault: 0}
        self.attempt(lambda: self.runtime.set_bits(bits))

    def attempt(self, call: Callable[[], object]) -> bool:
        """Whether nothing went wrong; what goes wrong is one of the faults, and each is raised only once."""
        raised = None
        try:
            call()
        except EXPECTED as error:
            raised = type(error)
        if raised in self.broken:
            self.broken[raised] -= 1
            assert self.broken[raised] >= 0
        return raised is None

    @rule(batch=st.integers(1, 3))
    def begin(self, batch):
        if len(self.running) < 4:
            self.running.append(Sequences(ArenaCache(self.pool, CONFIG), batch))
            self.runtime.begin_requests(batch)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 3), tokens=st.integers(1, 6), forecast=st.integers(0, 2))
    def forward(self, at, tokens, forecast):
        self.forward_of(self.running[at % len(self.running)], tokens, forecast)

    def forward_of(self, one: Sequences, tokens: int, forecast: int = 0) -> None:
        """What a patched model does: a boundary that knows what the forward takes, frames for it, the forward."""
        held = one.cache.frames_by_sequence(one.batch)
        request_kv = np.bincount(np.arange(one.batch) % 3, held, 3).astype(np.float32) if any(held) else None

        def until_the_forward() -> None:
            pending = self.pool.blocks(one.cache.missing_frames(one.batch, tokens))
            self.runtime.boundary(pending, forecast_blocks=forecast, request_kv=request_kv)
            one.cache.reserve(one.batch, tokens)

        if self.attempt(until_the_forward):
            shape = (one.batch, HEADS, tokens, HEAD_DIM)
            one.forward(torch.arange(one.batch * tokens * HEAD_DIM).view(shape) + 1e3 * next(self.keys))
        self.engine.launch_forward(self.runtime.tables)

    @rule(steps=st.integers(1, 20), seed=st.integers(0, 2**16), hurry=st.floats(0, 1))
    def serve(self, steps, seed, hurry):
        """Sequences come, decode and end, while copies and plans finish sooner or later."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            if len(self.running) < 3 and rng.random() < 0.3:
                self.begin(int(rng.integers(1, 4)))
            for one in self.running:
                self.forward_of(one, int(rng.integers(1, 4)))
            for ticket in [ticket for ticket in self.engine.pending if rng.random() < hurry]:
                if not ticket.finished:
                    ticket.turn()
            if self.threads.plan is not None and not self.threads.plan.finished and rng.random() < hurry:
                self.threads.plan.turn()
            if self.running and rng.random() < 0.05:
                self.running.pop(0).cache.release()
            self.table_arena_and_caches_are_true()
            self.kernels_see_only_what_is_there()

    @rule(pending=st.integers(0, 4))
    def boundary(self, pending):
        self.attempt(lambda: self.runtime.boundary(pending))
        self.engine.launch_forward(self.runtime.tables)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 3), how=st.sampled_from(["release", "drop"]))
    def end(self, at, how):
        one = self.running.pop(at % len(self.running))
        if how == "release":
            one.cache.release()
        del one
        gc.collect(0)
        self.pool.collect()

    @rule(apart=st.integers(2, 6), wanted=st.dictionaries(st.integers(0, 9), st.sampled_from(WIDTHS), max_size=6))
    def scatter(self, apart, wanted):
        """Others' KV takes every free frame, then leaves holes: tables find no run unless frames move."""
        if self.others:
            self.others.pop().give_all()
        free = self.arena.free_frames
        if free > 1:
            other = self.pool.new_holdings()
            if self.attempt(lambda: self.pool.take(other, free)):
                held = np.flatnonzero(self.arena.kinds == OwnerKind.KV)
                own = held[other._held[held]]
                other.give(np.setdiff1d(own, own[::apart]))
                self.others.append(other)
        bits = self.runtime.snapshot().bits
        bits[list(wanted)] = list(wanted.values())
        self.attempt(lambda: self.runtime.set_bits(bits))

    @precondition(lambda self: self.others)
    @rule()
    def others_end(self):
        self.others.pop().give_all()

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 3), data=st.data())
    def reorder(self, at, data):
        one = self.running[at % len(self.running)]
        order = data.draw(st.lists(st.integers(0, one.batch - 1), min_size=one.batch, max_size=one.batch))
        one.cache.reorder_cache(torch.tensor(order))
        one.truth = [states[order] for states in one.truth]

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 3), tokens=st.integers(1, 3))
    def crop(self, at, tokens):
        one = self.running[at % len(self.running)]
        length = one.truth[0].shape[2]
        if tokens <= length < WINDOW:
            one.cache.crop(-tokens)
            one.truth = [states[:, :, : length - tokens] for states in one.truth]

    @precondition(lambda self: self.engine.pending)
    @rule(data=st.data(), fail=SELDOM)
    def turn_copy_or_event(self, data, fail):
        data.draw(st.sampled_from(self.engine.pending), label="ticket").turn(fail=fail)

    @precondition(lambda self: self.threads.plan is not None and not self.threads.plan.finished)
    @rule(fail=SELDOM)
    def turn_plan(self, fail):
        self.threads.plan.turn(fail=fail)
        self.broken[PlanFault] += fail

    @rule(fault=st.sampled_from(["write", "launch", "event", "host", "gauge", "thread", "first", "second", "third"]))
    def break_next(self, fault):
        if fault == "write":
            self.engine.fail_next_write = True
        elif fault == "launch":
            self.engine.fail_next_launch = True
        elif fault == "event":
            self.engine.fail_next_fence = True
        elif fault == "thread":
            self.broken[PlanFault] += not self.threads.fails
            self.threads.fails = True
        elif fault == "host":
            self.model.host.short = True
        elif fault == "gauge":
            self.broken[GaugeFault] += not self.gauge.fails
            self.gauge.fails = True
        else:
            self.arena.refused = 1 + ["first", "second", "third"].index(fault)

    @rule(readings=st.integers(1, 12))
    def gauge_grows_stale(self, readings):
        self.gauge.stale_readings = readings

    @rule(data=st.data(), how=st.sampled_from(["drawn", "zero", "nan", "inf", "negative"]))
    def statistics(self, data, how):
        """What kernels counted, or what is no count at all."""
        seed = data.draw(st.integers(0, 2**16))
        generator = torch.Generator().manual_seed(seed)
        for counted in self.stats:
            counted.copy_(torch.rand(counted.shape, generator=generator) * 8)
        if how == "zero":
            self.stats.mass.zero_()
        elif how != "drawn":
            bad = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0}[how]
            self.stats.mass.view(-1)[seed % self.stats.mass.numel()] = bad
            self.stats.features.view(-1)[seed % self.stats.features.numel()] = bad

    @rule(row=st.integers(0, 9), plane=st.integers(2, 5))
    def forget_host_copy(self, row, plane):
        """Only of a page that is on the device, where it then is the only copy."""
        host = self.model.host
        if self.table.state[row, plane] == PageState.GPU and host.page(row, plane) is not None:
            host.forget(row, plane)
            HostPages.reserve(host, row, plane).fill_(0)

    @rule(bits=st.sampled_from(WIDTHS))
    def set_bits(self, bits):
        if self.attempt(lambda: self.runtime.set_bits(bits)):
            assert (self.runtime.snapshot().bits == bits).all()

    @rule(frames=st.integers(0, 300))
    def ensure_bytes(self, frames):
        if self.attempt(lambda: self.runtime.ensure_bytes(frames * FRAME_BYTES)):
            assert self.arena.free_frames >= frames

    @rule()
    def pause_or_resume(self):
        if self.pauses:
            self.runtime.resume()
            self.pauses -= 1
        else:
            self.runtime.pause()
            self.pauses += 1

    @rule(slot=st.integers(0, 2), confidence=st.floats(0, 1), low=st.floats(-1, 0), high=st.floats(0, 1))
    def set_request(self, slot, confidence, low, high):
        self.runtime.set_request(slot, confidence=confidence, rho_bounds=(low, high))

    @rule(seconds=st.sampled_from([1e-4, 0.03, 10.0]))
    def a_step_takes(self, seconds):
        self.pace._seconds.append(seconds)

    @rule(seconds=st.sampled_from([1.0, 1e6]))
    def clock_jumps(self, seconds):
        """As after the machine has slept: durations are wrong, nothing else is."""
        real = time.perf_counter
        readings = itertools.count()
        try:
            time.perf_counter = lambda: real() + seconds * next(readings)
            self.attempt(self.runtime.boundary)
        finally:
            time.perf_counter = real

    @rule()
    def look(self):
        seen = self.runtime.snapshot()
        assert sum(seen.bytes_by_owner.values()) == self.arena.frames * FRAME_BYTES
        assert seen.moves.stalled_seconds >= 0
        assert str(seen)
        if self.attempt(lambda: self.runtime.explain(layer=1, expert=0, projection="down")):
            assert self.runtime.explain()

    @invariant()
    def table_arena_and_caches_are_true(self):
        """And whatever is free holds garbage, which a forward that still reads there would find."""
        if not hasattr(self, "running"):
            return
        self.runtime.check()
        held = sum(one.cache.held_bytes for one in self.running)
        held += sum(other.frames for other in self.others) * FRAME_BYTES
        assert self.arena.bytes_by_owner()["kv"] == held
        self.arena.rows[torch.from_numpy(self.arena.kinds == OwnerKind.FREE)] = next(self.poison) % 256

    @invariant()
    def kernels_see_only_what_is_there(self):
        if hasattr(self, "running"):
            assert_published(self.model, self.runtime.tables, self.arena)

    @invariant()
    def no_page_is_lost(self):
        if hasattr(self, "running"):
            for row, plane in zip(*np.nonzero(self.table.state == PageState.CPU), strict=True):
                assert host_has(self.model, int(row), int(plane)), (row, plane)

    def teardown(self):
        """With every fault over, sequences end, everything comes to rest, and the arena is whole."""
        if not hasattr(self, "running"):
            return
        self.engine.fail_next_write = self.engine.fail_next_launch = self.engine.fail_next_fence = False
        self.model.host.short = self.gauge.fails = self.threads.fails = False
        self.arena.refused = self.gauge.stale_readings = 0
        for one in self.running:
            if self.attempt(lambda cache=one.cache, batch=one.batch: cache.reserve(batch, 1)):
                one.forward(torch.ones(one.batch, HEADS, 1, HEAD_DIM))
            one.cache.release()
        self.running.clear()
        while self.others:
            self.others_end()
        while not self.attempt(lambda: self.runtime.set_bits(2)):
            pass
        while not self.attempt(self.runtime.close):
            pass
        self.table_arena_and_caches_are_true()
        self.kernels_see_only_what_is_there()
        held = int(self.model.sizes.resident_bytes()[:, 0].sum())
        assert self.arena.free_bytes == self.arena.frames * FRAME_BYTES - held
