import logging
import threading

import numpy as np
import pytest
import torch

from pagedweight.layout import BlockId, Projection, RoutingStats
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.controller_signals import SignalReader
from pagedweight.runtime.frames import FIXED_KV_OWNER, Arena, OutOfFrames
from pagedweight.runtime.kv import ArenaGauge, CallableGauge, KVState
from pagedweight.runtime.pager_room import Room
from pagedweight.runtime.pages import HostPages
from pagedweight.runtime.transfer import ImmediateEngine
from tests.runtime.support import (
    FRAME_BYTES,
    CrankedEngine,
    TransferFault,
    assert_published,
    everything_at,
    random_policy,
    tiny_model,
    tiny_runtime,
)

CONFIG = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=2)
BLOCK_FRAMES = 4


def check(model, runtime: Runtime) -> None:
    runtime.check()
    assert_published(model, runtime.tables, runtime.arena)


def crank(runtime: Runtime) -> CrankedEngine:
    return runtime._engine


def test_kv_takes_every_byte_down_to_the_floor_and_gives_them_back():
    model = tiny_model()
    runtime = tiny_runtime(model, 400)
    assert runtime.snapshot().mean_bits == 6
    blocks = []
    while (model.resident_frames(2) + BLOCK_FRAMES * (len(blocks) + 1)) <= 400:
        runtime.boundary(pending_blocks=1)
        blocks.append(runtime.allocate_kv(BLOCK_FRAMES))
        runtime.arena.rows[torch.from_numpy(blocks[-1])] = len(blocks)
        check(model, runtime)
    assert (runtime.snapshot().bits == 2).all()
    assert all((runtime.arena.rows[torch.from_numpy(ids)] == at + 1).all() for at, ids in enumerate(blocks))
    with pytest.raises(OutOfFrames, match="missing"):
        runtime.allocate_kv(BLOCK_FRAMES)
    for ids in blocks:
        runtime.arena.free(ids)
        runtime.boundary()
        check(model, runtime)
    for _ in range(20):
        runtime.boundary()
    assert (runtime.snapshot().bits == 6).all()
    assert runtime.arena.bytes_by_owner()["kv"] == 0
    check(model, runtime)


def test_a_snapshot_says_in_words_what_is_held_moved_and_waited_for():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 100, engine=CrankedEngine)
    crank(runtime).model = model
    runtime.set_bits(6)
    runtime.set_bits(3)
    seen = runtime.snapshot()
    mib = {name: f"{held / 2**20:.1f}" for name, held in seen.bytes_by_owner.items()}
    text = str(seen)
    assert f"planes {mib['plane']}, tables {mib['table']}, KV {mib['kv']}, free {mib['free']}; in flight 0.0" in text
    assert "weights at 3.00 bits: 3 bits" in text
    assert f"{seen.moves.lowered_rows} rows lowered" in text
    assert seen.moves.loading_seconds > 0
    assert seen.moves.loaded_bytes_per_second == seen.moves.loaded_bytes / seen.moves.loading_seconds
    assert seen.moves.stalled_seconds == 0
    for _ in range(2 * CONFIG.min_dwell_steps):
        runtime.boundary()
    assert runtime.snapshot().in_flight_bytes == runtime.snapshot().loading_bytes > 0
    runtime.ensure_bytes(runtime.arena.free_bytes + 1)
    assert runtime.snapshot().moves.stalled_seconds > 0


def test_snapshot_bytes_are_the_bytes_held():
    model = tiny_model()
    runtime = tiny_runtime(model, 400)
    runtime.set_bits(np.array([2, 3, 4, 6, 2, 3, 4, 6, 2, 3]))
    seen = runtime.snapshot()
    held = everything_at(runtime._table)
    assert seen.weight_bytes == held["plane"] + held["table"] == sum(seen.bytes_by_width.values())
    assert sum(seen.bytes_by_owner.values()) == 400 * FRAME_BYTES
    weights = [n * k for n, k in model.layout.row_shapes()]
    assert seen.mean_bits == pytest.approx(np.average(seen.bits, weights=weights))
    assert (seen.loading_bytes, seen.releasing_bytes, seen.shortfall_bytes) == (0, 0, 0)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_width_is_reached_whatever_lies_scattered_when_the_bytes_are_there(monkeypatch, one_by_one):
    """Also when more tables look for neighbours than windows are cleared in one go."""
    if one_by_one:
        monkeypatch.setattr("pagedweight.runtime.pager_room._MOST_WINDOWS", 1)
        monkeypatch.setattr(Room, "renew", lambda room, coming, renew=Room.renew: renew(room, 0))
    model = tiny_model(experts=(24,))
    runtime = tiny_runtime(model, 2 * model.resident_frames(6))
    runtime.follow_kv(lambda sources, targets: None)
    runtime.set_bits(2)
    taken = runtime.allocate_kv(runtime.arena.free_frames)
    runtime.arena.free(taken[::2])
    before = runtime.snapshot().moves
    runtime.set_bits(6)
    moves = runtime.snapshot().moves
    in_two_goes = moves.raised_rows - before.raised_rows > model.layout.rows
    assert in_two_goes == one_by_one
    assert moves.relocated_bytes > before.relocated_bytes
    runtime.check()


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_every_uniform_width_is_reached_from_every_other(bits):
    model = tiny_model()
    runtime = tiny_runtime(model, 400)
    for start in (6, 2, 4):
        runtime.set_bits(start)
        runtime.set_bits(bits)
        assert (runtime.tables.bits == bits).all()
        check(model, runtime)


@pytest.mark.parametrize(("bits", "error"), [("4", TypeError), (4.7, TypeError), ([4, 4, 4], ValueError)])
def test_widths_of_another_kind_or_number_are_refused_and_nothing_moves(bits, error):
    runtime = tiny_runtime(tiny_model(), 400)
    before = runtime.tables.bits.clone()
    with pytest.raises(error, match="give one width, or one for each of 10 rows"):
        runtime.set_bits(bits)
    assert (runtime.tables.bits == before).all()


def test_addresses_of_the_device_tables_never_change():
    runtime = tiny_runtime(tiny_model(), 400)
    before = [t.data_ptr() for t in runtime.tables]
    runtime.set_bits(3)
    runtime.boundary()
    assert [t.data_ptr() for t in runtime.tables] == before


def test_impossible_widths_are_refused():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(4) + 20)
    with pytest.raises(ValueError, match=r"\[5\]"):
        runtime.set_bits(5)
    with pytest.raises(OutOfFrames, match="raise the budget"):
        runtime.set_bits(6)
    check(model, runtime)


def test_a_budget_below_the_floor_is_one_clear_error():
    model = tiny_model()
    with pytest.raises(ValueError, match="raise the budget"):
        tiny_runtime(model, model.resident_frames(2) - 1)


def test_initial_widths_leave_the_reload_threshold_free():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(4))
    kv = ArenaGauge(runtime.arena, BLOCK_FRAMES).read()
    assert kv.free_blocks > CONFIG.reload_free_blocks
    assert 2 < runtime.snapshot().mean_bits < 6
    check(model, runtime)


def test_case_89_without_a_gauge_widths_stay_and_it_says_why():
    model = tiny_model()
    arena = Arena(400 * FRAME_BYTES, FRAME_BYTES)
    runtime = Runtime(model.layout, model.host, arena, random_policy(model.layout), CONFIG, ImmediateEngine(arena))
    runtime.set_bits(4)
    for _ in range(20):
        runtime.boundary(pending_blocks=3)
    assert (runtime.snapshot().bits == 4).all()
    assert "no KV gauge" in runtime.explain()


def test_case_84_space_that_was_seen_is_gone_when_it_is_asked_for():
    """Someone takes the free frames before the allocation: weights make room, or it says what is missing."""
    model = tiny_model()
    runtime = tiny_runtime(model, 300)
    runtime.boundary(pending_blocks=1)
    thief = runtime.allocate_kv(runtime.arena.free_frames)
    ids = runtime.allocate_kv(BLOCK_FRAMES)
    assert len(ids) == BLOCK_FRAMES
    check(model, runtime)
    runtime.boundary()
    with pytest.raises(OutOfFrames, match=r"were free, .* released, .* missing"):
        runtime.allocate_kv(300)
    check(model, runtime)
    runtime.arena.free(thief)
    runtime.arena.free(ids)


@pytest.mark.parametrize("shortage", [OutOfFrames, torch.OutOfMemoryError])
def test_an_allocation_that_fails_is_tried_again_after_weights_gave_bytes_up(shortage):
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 30)
    runtime.set_bits(6)
    free, tries = [], iter(range(10))

    def allocate() -> str:
        """Fails until twice the bytes are free, as an allocator would that needs them together."""
        free.append(runtime.arena.free_bytes)
        next(tries)
        if free[-1] < 2 * wanted:
            raise shortage("no memory")
        return "memory"

    wanted = runtime.arena.free_bytes + 40 * FRAME_BYTES
    assert runtime.allocating(allocate, wanted) == "memory"
    assert free[0] < wanted <= free[1] < 2 * wanted <= free[2]
    check(model, runtime)


def test_an_allocation_that_never_succeeds_ends_after_a_few_attempts_and_says_why():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 30)
    tries = []

    def allocate() -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("the device is full")

    with pytest.raises(OutOfFrames, match="fails after 3 attempts all the same") as failed:
        runtime.allocating(allocate, FRAME_BYTES)
    assert isinstance(failed.value.__cause__, torch.OutOfMemoryError)
    assert len(tries) == 4
    tries.clear()
    with pytest.raises(OutOfFrames, match=r"were free, .* released, .* missing"):
        runtime.allocating(allocate, 10**9)
    assert len(tries) == 1
    with pytest.raises(ZeroDivisionError):
        runtime.allocating(lambda: 1 // 0, FRAME_BYTES)
    check(model, runtime)


@pytest.mark.parametrize("engine", [ImmediateEngine, CrankedEngine])
def test_the_coming_forward_finds_its_blocks(engine):
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, engine=engine)
    if engine is CrankedEngine:
        crank(runtime).model = model
    runtime.set_bits(6)
    runtime.boundary(pending_blocks=20)
    assert runtime.arena.free_frames >= 20 * BLOCK_FRAMES
    runtime.arena.allocate(20 * BLOCK_FRAMES, runtime.arena.owner(runtime.allocate_kv(1)[0]))


def test_case_88_a_target_out_of_reach_is_met_once_and_logged_once(caplog):
    model = tiny_model()
    runtime = tiny_runtime(model, 400, gauge=CallableGauge(lambda: KVState(0, 10 * 400 * FRAME_BYTES)))
    with caplog.at_level(logging.INFO, logger="pagedweight"):
        runtime.boundary()
        first = runtime.snapshot()
        for _ in range(999):
            runtime.boundary()
    assert (first.bits == 2).all()
    assert runtime.snapshot().moves.lowered_rows == first.moves.lowered_rows == model.layout.rows
    assert runtime.snapshot().shortfall_bytes > 0
    assert len(caplog.records) == 1


def test_case_90_free_blocks_around_the_threshold_move_no_block_back_and_forth():
    model = tiny_model()
    free = iter(CONFIG.offload_free_blocks + (-1) ** step for step in range(1, 10_000))
    runtime = tiny_runtime(model, 400, gauge=CallableGauge(lambda: KVState(next(free), FRAME_BYTES)))
    bits = [runtime.snapshot().bits]
    for _ in range(100):
        runtime.boundary()
        bits.append(runtime.snapshot().bits)
    assert (np.diff(bits, axis=0) <= 0).all()  # no reload below its own threshold
    assert runtime.snapshot().moves.released_bytes <= runtime.arena.memory.numel()
    check(model, runtime)


def test_case_90_swings_across_both_thresholds_move_a_block_once_in_its_dwell_time():
    model = tiny_model()
    config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=50)
    swing = iter([0, 100] * 1000)
    gauge = CallableGauge(lambda: KVState(next(swing), 4 * FRAME_BYTES))
    runtime = tiny_runtime(model, 400, config, gauge=gauge)
    bits = [runtime.snapshot().bits]
    for _ in range(100):
        runtime.boundary()
        bits.append(runtime.snapshot().bits)
    raises = (np.diff(bits, axis=0) > 0).sum(0)
    assert raises.max() <= 2
    check(model, runtime)


def test_reload_waits_for_the_dwell_time_and_leaves_the_threshold_free():
    model = tiny_model()
    config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=10)
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, config)
    ids = runtime.allocate_kv(runtime.arena.free_frames)
    runtime.boundary()
    lowered = runtime.snapshot().bits
    assert (lowered < 6).any()
    runtime.arena.free(ids)
    for step in range(9):
        runtime.boundary()
        assert (runtime.snapshot().bits <= lowered).all(), step
    for _ in range(30):
        runtime.boundary()
        assert runtime.snapshot().kv.free_blocks > config.reload_free_blocks
    assert runtime.snapshot().mean_bits > lowered.mean()
    check(model, runtime)


@pytest.mark.parametrize("spare_frames", range(4))
def test_the_last_row_rises_while_its_old_table_borrows_blocks_of_the_threshold(spare_frames):
    """Room for everything at the parent width and the threshold's blocks, and nothing for a table twice."""
    model = tiny_model()
    kept = (CONFIG.reload_free_blocks + 1) * BLOCK_FRAMES
    runtime = tiny_runtime(model, model.resident_frames(6) + kept + spare_frames)
    ids = runtime.allocate_kv(runtime.arena.free_frames + 40)
    for _ in range(5):
        runtime.boundary()
    assert runtime.snapshot().mean_bits < 6
    runtime.arena.free(ids)
    lowered = runtime.snapshot().moves.lowered_rows
    for _ in range(60):
        runtime.boundary()
        assert ArenaGauge(runtime.arena, BLOCK_FRAMES).read().free_blocks > CONFIG.offload_free_blocks
    assert (runtime.snapshot().bits == 6).all()
    assert runtime.snapshot().moves.lowered_rows == lowered
    assert runtime.snapshot().kv.free_blocks == CONFIG.reload_free_blocks + 1 + spare_frames // BLOCK_FRAMES
    check(model, runtime)


def test_rows_without_a_run_for_their_table_do_not_keep_others_down(monkeypatch):
    """Much is free, but in pieces that cannot be joined: rows with small tables come back, and asking in vain is not
    repeated at once.
    """
    monkeypatch.setattr("pagedweight.runtime.pager_room._MOST_WINDOWS", 0)
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 200)
    runtime.set_bits(2)
    taken = runtime.allocate_kv(runtime.arena.free_frames)
    runtime.arena.free(taken[np.arange(len(taken)) % 9 != 0])  # runs of eight frames
    for _ in range(60):
        runtime.boundary()
    assert runtime.snapshot().bits.tolist() == [6] * 6 + [4] * 4  # 6 bits take 24 and 16 frames in the last rows
    assert runtime.snapshot().moves.deferred_rows < 60
    check(model, runtime)


def test_a_forecast_counts_against_every_threshold_and_ends_without_a_swing():
    model = tiny_model()
    free_blocks = 12
    runtime = tiny_runtime(model, 400, gauge=CallableGauge(lambda: KVState(free_blocks, 4 * FRAME_BYTES)))
    for _ in range(20):
        runtime.boundary(forecast_blocks=9)  # 3 are left: above the offload threshold, below the reload threshold
    assert (runtime.snapshot().bits == 6).all()
    runtime.boundary(forecast_blocks=10)
    lowered = runtime.snapshot().bits
    assert (lowered < 6).any()
    for forecast in (9, 6):
        for _ in range(20):
            runtime.boundary(forecast_blocks=forecast)
        assert (runtime.snapshot().bits <= lowered).all()
        lowered = runtime.snapshot().bits
    for _ in range(40):
        runtime.boundary()
    assert (runtime.snapshot().bits == 6).all()


def test_old_tables_beside_new_ones_never_cause_pressure():
    """All rows want to rise at once from just below the parent width, where their tables weigh most."""
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, CONFIG)
    runtime.set_bits(2)
    runtime.set_bits(4)
    least = runtime.arena.frames
    for _ in range(40):
        runtime.boundary()
        least = min(least, runtime.arena.free_frames)
    assert least // BLOCK_FRAMES > CONFIG.offload_free_blocks
    assert (runtime.snapshot().bits == 6).all()


def test_what_is_being_released_is_not_asked_for_again():
    """The frames of a lowering are not free before their fence; until then one lowering is enough."""
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, engine=CrankedEngine)
    crank(runtime).model = model
    runtime.set_bits(6)
    runtime.allocate_kv(runtime.arena.free_frames)
    runtime.boundary()
    first = runtime.snapshot()
    assert first.releasing_bytes > 0
    for _ in range(10):
        runtime.boundary()
    assert (runtime.snapshot().bits == first.bits).all()
    assert runtime.snapshot().shortfall_bytes == 0


@pytest.mark.parametrize("engine", [ImmediateEngine, CrankedEngine])
def test_no_more_is_on_its_way_in_than_the_config_lets(engine):
    model = tiny_model()
    largest = int(model.sizes.resident_bytes()[:, -1].max())
    config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=0, max_loading_bytes=largest)
    runtime = tiny_runtime(model, 400, config, engine=engine)
    assert (runtime.snapshot().bits == 6).all()  # placed in parts
    runtime.set_bits(2)
    for step in range(60):
        runtime.boundary()
        assert runtime.snapshot().loading_bytes <= largest
        if engine is CrankedEngine and step % 3 == 0:
            for ticket in list(crank(runtime).pending):
                ticket.turn()
    assert (runtime.snapshot().bits == 6).all()


def test_blocks_of_another_engine_do_not_make_room_in_the_arena():
    """Its gauge says that plenty is free; raises are still bounded by what the arena has, so none is put off."""
    model = tiny_model()
    gauge = CallableGauge(lambda: KVState(1000, 4 * FRAME_BYTES))
    runtime = tiny_runtime(model, model.resident_frames(4) + 20, gauge=gauge)
    runtime.set_bits(2)
    for _ in range(40):
        runtime.boundary()
    assert runtime.snapshot().moves.deferred_rows == 0
    assert runtime.snapshot().mean_bits > 3.5
    check(model, runtime)


def test_statistics_that_are_on_their_way_are_waited_for_and_not_asked_for_again():
    """On a device each request lands some boundaries later; asking anew at each would leave none to land."""
    arena = Arena(8 * FRAME_BYTES, FRAME_BYTES)
    engine = CrankedEngine(arena)
    stats = RoutingStats.zeros(1, 1, 2)
    stats.mass[0, 0] = torch.tensor([1.0, 3.0])
    reader = SignalReader(stats, engine, log_features=False)
    assert [reader.refresh() for _ in range(5)] == [None] * 5
    (ticket,) = engine.pending
    ticket.turn()
    assert reader.refresh().merged.mass.tolist() == [[0.25, 0.75]]


def test_nothing_moves_while_paused():
    model = tiny_model()
    runtime = tiny_runtime(model, 400, gauge=CallableGauge(lambda: KVState(0, 4096)))
    runtime.pause()
    runtime.boundary()
    assert (runtime.snapshot().bits == 6).all()
    runtime.resume()
    runtime.boundary()
    assert (runtime.snapshot().bits < 6).any()


def test_pauses_nest():
    model = tiny_model()
    runtime = tiny_runtime(model, 400, gauge=CallableGauge(lambda: KVState(0, 4096)))
    runtime.pause()
    runtime.pause()
    runtime.resume()
    runtime.boundary()
    assert (runtime.snapshot().bits == 6).all()
    runtime.resume()
    runtime.resume()
    runtime.boundary()
    assert (runtime.snapshot().bits < 6).any()


class HeldReading:
    """Says that there are blocks enough; once `short`, that there are none, and only when it may go on."""

    def __init__(self) -> None:
        self.short, self.reading, self.go_on = False, threading.Event(), threading.Event()

    def __call__(self) -> KVState:
        if self.short:
            self.reading.set()
            assert self.go_on.wait(10)
        return KVState(0 if self.short else 1000, BLOCK_FRAMES * FRAME_BYTES)


@pytest.mark.parametrize(
    "call",
    [
        lambda runtime: runtime.set_bits(3),
        lambda runtime: runtime.ensure_bytes(64 * FRAME_BYTES),
        lambda runtime: runtime.allocate_kv(8),
        lambda runtime: runtime.allocating(lambda: runtime.allocate_kv(8), 8 * FRAME_BYTES),
        lambda runtime: runtime.snapshot(),
        lambda runtime: runtime.explain(),
        lambda runtime: runtime.explain(BlockId(4, 1, Projection.DOWN)),
        lambda runtime: runtime.begin_requests(1),
        lambda runtime: runtime.pause(),
    ],
    ids=[
        "set_bits",
        "ensure_bytes",
        "allocate_kv",
        "allocating",
        "snapshot",
        "explain",
        "explain a block",
        "begin_requests",
        "pause",
    ],
)
def test_what_another_thread_asks_for_waits_for_the_boundary_on_its_way(call):
    """Each of these reads or changes the page table, or the statistics on their way."""
    model = tiny_model()
    gauge = HeldReading()
    runtime = tiny_runtime(model, 400, gauge=CallableGauge(gauge))
    gauge.short = True
    boundary, asking = threading.Thread(target=runtime.boundary), threading.Thread(target=call, args=(runtime,))
    boundary.start()
    assert gauge.reading.wait(10)
    asking.start()
    asking.join(0.05)
    assert asking.is_alive()
    gauge.go_on.set()
    boundary.join(10)
    asking.join(10)
    assert not asking.is_alive()
    runtime.check()


def test_a_loop_of_boundaries_lets_others_in():
    """A lock of threading's would be taken again before who waits for it has woken up."""
    runtime = tiny_runtime(tiny_model(), 400, gauge=CallableGauge(lambda: KVState(1000, 4096)))
    ending, turns = threading.Event(), [0]

    def boundaries() -> None:
        while not ending.is_set():
            runtime.boundary()
            turns[0] += 1

    def pauses() -> None:
        for _ in range(50):
            runtime.pause()
            runtime.resume()

    loop, others = threading.Thread(target=boundaries), [threading.Thread(target=pauses) for _ in range(2)]
    loop.start()
    for other in others:
        other.start()
    for other in others:
        other.join(20)
    standing = [other.is_alive() for other in others]
    ending.set()
    loop.join(20)
    assert standing == [False, False]
    runtime.check()


def test_what_held_widths_cannot_give_is_not_blamed_on_the_floor():
    model = tiny_model()
    runtime = tiny_runtime(model, 400)
    runtime.set_bits(4)
    runtime.pause()
    with pytest.raises(OutOfFrames, match="nothing is released while widths are held"):
        runtime.allocate_kv(runtime.arena.free_frames + 1)
    assert (runtime.snapshot().bits == 4).all()
    runtime.resume()
    runtime.allocate_kv(runtime.arena.free_frames + 1)


def test_deterministic_runtimes_do_not_depend_on_when_copies_finish():
    traces = []
    for engine in (ImmediateEngine, CrankedEngine):
        model = tiny_model()
        config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=2, deterministic=True)
        runtime = tiny_runtime(model, 320, config, engine=engine)
        blocks, trace = [], []
        for step in range(60):
            runtime.boundary(pending_blocks=1)
            if step < 40:
                blocks.append(runtime.allocate_kv(BLOCK_FRAMES))
            elif blocks:
                runtime.arena.free(blocks.pop())
            trace.append(runtime.snapshot().bits)
        traces.append(np.array(trace))
    assert (traces[0] == traces[1]).all()


def test_case_99_ranks_that_plan_for_the_scarcest_of_them_stay_in_step():
    """The in-process half of the case: one decision from the smallest F gives the same widths everywhere."""
    model_a, model_b = tiny_model(), tiny_model()
    rng = np.random.default_rng(3)
    scarcest = [0]
    gauge = CallableGauge(lambda: KVState(scarcest[0], 512))
    ranks = [tiny_runtime(model, frames, gauge=gauge) for model, frames in ((model_a, 400), (model_b, 463))]
    for _ in range(50):
        scarcest[0] = int(min(rng.integers(0, 100), rng.integers(0, 63)))
        for rank in ranks:
            rank.boundary()
        assert (ranks[0].snapshot().bits == ranks[1].snapshot().bits).all()


def test_a_fault_in_a_boundary_leaves_a_runtime_that_goes_on():
    model = tiny_model()
    runtime = tiny_runtime(model, 400, engine=CrankedEngine)
    runtime.set_bits(2)
    for _ in range(3):
        runtime.boundary()
    loading = [ticket for ticket in crank(runtime).pending if ticket.moves_bytes]
    assert loading
    loading[0].turn(fail=True)
    with pytest.raises(TransferFault):
        runtime.boundary()
    check(model, runtime)
    for _ in range(40):
        runtime.boundary()
        for ticket in list(crank(runtime).pending):
            ticket.turn()
    assert (runtime.snapshot().bits == 6).all()
    check(model, runtime)


def test_live_statistics_change_which_blocks_are_lowered():
    def lowered(hot_expert: int) -> np.ndarray:
        model = tiny_model(experts=(4,))
        stats = RoutingStats.zeros(1, 1, 4)
        stats.mass[0, 0] = 1.0
        stats.mass[0, 0, hot_expert] = 100.0
        arena = Arena(400 * FRAME_BYTES, FRAME_BYTES)
        policy = random_policy(model.layout)
        policy = policy.replaced(
            s_bar=np.tile(policy.s_bar[:1], (8, 1)),
            bucket_edges=[0.5],
            multipliers=[1.0, 1000.0],
            floors=[[2, 2]],
            depth_caps=[[4, 4]],
        )
        gauge = CallableGauge(lambda: KVState(0, 4 * FRAME_BYTES))
        runtime = Runtime(model.layout, model.host, arena, policy, CONFIG, ImmediateEngine(arena), gauge, stats)
        runtime.boundary()
        return np.flatnonzero(runtime.snapshot().bits < 6) // 2

    for hot in (0, 3):
        assert len(lowered(hot))
        assert hot not in lowered(hot)


def test_explain_names_a_block_by_the_models_own_layer_number():
    runtime = tiny_runtime(tiny_model(), 400)
    runtime.set_bits(3)
    told = runtime.explain(BlockId(4, 1, Projection.DOWN))
    assert told.startswith("layers.4.experts.1.down: 3 bits committed")
    assert "GPU GPU GPU CPU CPU CPU" in told
    with pytest.raises(KeyError):
        runtime.explain(BlockId(2, 0, Projection.DOWN))


def test_explain_asks_the_device_nothing_while_paused(monkeypatch):
    """A fence or a copy from another thread would end a graph's capture."""
    runtime = tiny_runtime(tiny_model(), 400)
    monkeypatch.setattr(SignalReader, "refresh", lambda self, **_: pytest.fail("statistics were asked for"))
    runtime.pause()
    assert "bits committed" in runtime.explain(BlockId(4, 1, Projection.DOWN))


def test_case_83_a_runtime_born_in_inference_mode_moves_pages_outside():
    with torch.inference_mode():
        model = tiny_model()
        runtime = tiny_runtime(model, 400)
    runtime.set_bits(3)
    with torch.inference_mode():
        runtime.set_bits(4)
    runtime.boundary()
    check(model, runtime)


def test_case_78_host_memory_stays_flat_over_cycles():
    model = tiny_model()
    runtime = tiny_runtime(model, 400)
    host: HostPages = model.host
    before = host.bytes
    for _ in range(20):
        runtime.set_bits(2)
        runtime.set_bits(6)
    assert host.bytes == before
    assert runtime.snapshot().moves.written_back_bytes == 0


def test_close_finishes_what_is_in_flight():
    model = tiny_model()
    runtime = tiny_runtime(model, 400, engine=CrankedEngine)
    runtime.set_bits(2)
    for _ in range(3):
        runtime.boundary()
    assert not runtime.idle
    runtime.close()
    assert runtime.idle
    runtime.check()
    runtime.boundary()
    with pytest.raises(RuntimeError, match=r"closed.*patch the model again"):
        runtime.set_bits(3)
    runtime.resume()
    for _ in range(20):
        runtime.boundary(pending_blocks=1)
    runtime.close()
    runtime.check()


def test_close_waits_for_a_boundary_on_another_thread_and_finishes_what_it_began():
    model = tiny_model()
    gauge = HeldReading()
    runtime = tiny_runtime(model, 400, gauge=CallableGauge(gauge), engine=CrankedEngine)
    gauge.short = True
    boundary = threading.Thread(target=runtime.boundary)
    boundary.start()
    assert gauge.reading.wait(10)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    closing.join(0.2)
    gauge.go_on.set()
    boundary.join(10)
    closing.join(10)
    assert runtime.snapshot().moves.lowered_rows > 0
    assert runtime.idle
    runtime.check()


@pytest.mark.parametrize("spoil", ["bits", "frame_address"])
def test_a_check_compares_what_was_published(spoil):
    runtime = tiny_runtime(tiny_model(), 400)
    runtime.set_bits(4)
    runtime.check()
    getattr(runtime.tables, spoil)[3] += 128
    with pytest.raises(AssertionError):
        runtime.check()


def test_what_weights_can_release_is_what_they_hold_above_the_floor():
    model = tiny_model()
    runtime = tiny_runtime(model, 400)
    floor = model.resident_frames(2)
    for bits in (2, 4, 6):
        runtime.set_bits(bits)
        assert runtime.releasable_bytes == (model.resident_frames(bits) - floor) * FRAME_BYTES


def test_a_window_for_fixed_kv_is_taken_from_the_weights_if_need_be():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 8)
    runtime.set_bits(6)
    count = 40
    origin = runtime.arena.frames - 2 * count
    first = runtime.allocate_kv_window(count, origin)
    assert runtime.arena.are_owned_by(np.arange(first, first + count), FIXED_KV_OWNER)
    assert (first - origin) % count == 0
    runtime.check()
    runtime.allocate_kv_window(count, origin)
    with pytest.raises(OutOfFrames, match="attempts"):
        runtime.allocate_kv_window(count, origin)


def test_pending_blocks_make_only_as_many_rows_fall_as_they_need():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 28)
    runtime.set_bits(6)
    runtime.boundary(pending_blocks=8)
    assert (runtime.snapshot().bits == 6).any()
