"""Planning beside the forwards, the operator's limits, signals that swing or stand still, and traces: end to end."""

import gc
import threading
import warnings

import numpy as np
import pytest
import torch

from pagedweight.layout import Projection, RoutingStats
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.controller_queue import ReadyQueue
from pagedweight.runtime.controller_work import PlanWorker
from pagedweight.runtime.frames import Arena, OutOfFrames
from pagedweight.runtime.kv import CallableGauge, KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner_scores import parent_damage
from pagedweight.runtime.planner_trace import replay
from pagedweight.runtime.transfer import ImmediateEngine
from tests.runtime.support import (
    FRAME_BYTES,
    CrankedEngine,
    TinyModel,
    assert_published,
    random_policy,
    tiny_model,
    tiny_runtime,
)

THRESHOLDS = {"offload_free_blocks": 2, "reload_free_blocks": 6}
BACKGROUND = RuntimeConfig(**THRESHOLDS, min_dwell_steps=2, background_rows=0)


def predicted_damage(runtime: Runtime) -> float:
    """Of the present widths against the parent width, without live signals."""
    seen = runtime._table.snapshot()
    damage = parent_damage(seen, Observation(KVState(0, 1)), runtime.policy)
    return float(damage[np.searchsorted(seen.widths, seen.committed), np.arange(len(seen.committed))].sum())


def settled(runtime: Runtime, boundaries: int = 1) -> None:
    """Boundaries with time between them for the planner to finish, as a forward gives it."""
    for _ in range(boundaries):
        runtime.boundary()
        coming = runtime._planning._worker._coming
        if coming is not None:
            coming[1].result()


@pytest.mark.parametrize("blocks_short", [1, 4])
def test_pressure_finds_a_plan_ready_and_room_is_given_back(blocks_short: int) -> None:
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, BACKGROUND)
    settled(runtime, 3)
    held = []
    for _ in range(12):
        held.append(runtime.allocate_kv(4 * blocks_short))
        settled(runtime, 2)
    assert (runtime.snapshot().bits < 6).any()
    assert runtime.snapshot().kv.free_blocks > THRESHOLDS["offload_free_blocks"]
    assert runtime._planning.queue.ready > 0
    for ids in held:
        runtime.arena.free(ids)
    settled(runtime, 40)
    assert (runtime.snapshot().bits == 6).all()
    runtime.check()
    assert_published(model, runtime.tables, runtime.arena)
    runtime.close()


def test_a_plan_from_the_queue_is_what_the_planner_predicted() -> None:
    """Ready or made at the boundary: the same bytes for at most one step's damage more."""
    damages = []
    for config in (BACKGROUND, RuntimeConfig(**THRESHOLDS, min_dwell_steps=2)):
        model = tiny_model()
        runtime = tiny_runtime(model, model.resident_frames(6) + 40, config)
        settled(runtime, 3)
        runtime.allocate_kv(runtime.arena.free_frames)
        settled(runtime)
        assert runtime.snapshot().moves.lowered_rows
        assert runtime._planning.queue.made_late == (config is not BACKGROUND)
        damages.append(predicted_damage(runtime))
        runtime.close()
    assert damages[1] <= damages[0] <= 3 * damages[1]


def test_the_worker_answers_one_question_at_a_time_and_drops_answers_to_old_ones() -> None:
    gate, worker, asked = threading.Event(), PlanWorker(background=True), []

    def prepare():
        asked.append(len(asked))
        return lambda: gate.wait(10) and asked[-1]

    assert worker.ask("old", prepare) is None
    assert worker.ask("new", prepare) is None
    assert asked == [0], "a second question while the first is open"
    gate.set()
    assert worker.take("old", wait=True) == 0
    assert worker.ask("old", prepare) is None
    worker._coming[1].result()
    assert worker.ask("new", prepare) is None, "an answer to another question"
    assert worker.take("new", wait=True) == 2
    worker.close()


def test_a_fault_in_the_planner_reaches_the_boundary() -> None:
    runtime = tiny_runtime(tiny_model(), 400, BACKGROUND)
    object.__setattr__(runtime.policy, "widths", (2, 3))
    runtime.boundary()
    with pytest.raises(ValueError, match="calibrate for this checkpoint"):
        settled(runtime, 2)
    runtime.close()


def swinging(amplitude: int, threshold: int):
    """F of another engine: around the threshold, whatever weights release."""
    at = iter(range(10**6))
    return lambda: threshold + (amplitude if next(at) % 2 else -amplitude)


@pytest.mark.parametrize("config", [RuntimeConfig(**THRESHOLDS), BACKGROUND], ids=["inline", "background"])
def test_case_90_an_external_count_that_swings_around_the_threshold_moves_a_block_at_most_twice(config) -> None:
    """F alternates T - 1 and T + 1 for 100 steps: pages move at most twice, and the bytes are those of one answer."""
    free = swinging(1, config.offload_free_blocks)
    model = tiny_model()
    runtime = tiny_runtime(model, 400, config, gauge=CallableGauge(lambda: KVState(free(), FRAME_BYTES)))
    bits = [runtime.snapshot().bits]
    for _ in range(100):
        settled(runtime)
        bits.append(runtime.snapshot().bits)
    moves = (np.diff(bits, axis=0) != 0).sum(0)
    assert 1 <= moves.max() <= 2
    largest_step = int(np.diff(model.sizes.resident_bytes(), axis=1).max())
    assert runtime.snapshot().moves.released_bytes < 2 * FRAME_BYTES + largest_step
    runtime.close()


def test_a_count_that_falls_is_answered_every_time() -> None:
    """Real growth is no noise: it lasts, or gets worse than what was answered."""
    free = [3]
    runtime = tiny_runtime(
        tiny_model(), 400, RuntimeConfig(**THRESHOLDS), gauge=CallableGauge(lambda: KVState(free[0], FRAME_BYTES))
    )
    bits = []
    for free[0] in (3, 2, 3, 1, 3, 0, 3, 1, 1, 2, 2):
        runtime.boundary()
        bits.append(int(runtime.snapshot().bits.sum()))
    assert np.flatnonzero(np.diff(bits)).tolist() == [0, 2, 4, 7, 8]


def test_a_count_that_stands_still_is_answered_once() -> None:
    """In-flight bytes: what was released for a reading counts until the reading changes."""
    free = [1]
    runtime = tiny_runtime(
        tiny_model(), 400, RuntimeConfig(**THRESHOLDS), gauge=CallableGauge(lambda: KVState(free[0], 4 * FRAME_BYTES))
    )
    runtime.boundary()
    once = runtime.snapshot().moves.lowered_rows
    for _ in range(100):
        runtime.boundary()
    assert runtime.snapshot().moves.lowered_rows == once > 0
    free[0] = 0
    runtime.boundary()
    assert runtime.snapshot().moves.lowered_rows > once


def under_all_pressure(config: RuntimeConfig, model: TinyModel) -> Runtime:
    """Everything that the limits let go has been asked for, by plans and by an allocation that cannot wait."""
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, config)
    runtime.allocate_kv(runtime.arena.free_frames)
    for _ in range(10):
        runtime.boundary(pending_blocks=200)
    with pytest.raises(OutOfFrames):
        runtime.allocate_kv(10**4)
    runtime.check()
    return runtime


def test_pinned_experts_keep_their_bits_in_every_emergency() -> None:
    model = tiny_model()
    config = RuntimeConfig(**THRESHOLDS, pinned_experts=((1, 2, 6), (4, 0, 4)))
    runtime = under_all_pressure(config, model)
    bits = {str(block): int(b) for block, b in zip(model.layout.blocks(), runtime.snapshot().bits, strict=True)}
    for projection in Projection:
        assert bits[f"layers.1.experts.2.{projection.label}"] == 6
        assert bits[f"layers.4.experts.0.{projection.label}"] >= 4
    assert list(bits.values()).count(2) == len(bits) - 4
    assert "a pin at 6 bits" in runtime.explain(1, 2, "down")


@pytest.mark.parametrize("pin", [(1, 3, 6), (2, 0, 6), (1, 0, 5)])
def test_pins_on_what_the_model_does_not_have_are_refused(pin: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pinned_experts"):
        tiny_runtime(tiny_model(), 400, RuntimeConfig(**THRESHOLDS, pinned_experts=(pin,)))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_the_quality_budget_is_never_exceeded(share: float) -> None:
    model = tiny_model()
    at_floor = tiny_runtime(model, 400)
    at_floor.set_bits(2)
    limit = share * predicted_damage(at_floor)
    runtime = under_all_pressure(RuntimeConfig(**THRESHOLDS, damage_limit=limit), tiny_model())
    assert predicted_damage(runtime) <= limit * (1 + 1e-9)
    assert (predicted_damage(runtime) > 0.5 * limit) or share == 0.0
    assert runtime.snapshot().shortfall_bytes > 0


def test_a_weight_limit_holds_before_and_after_pressure() -> None:
    model = tiny_model()
    limit = model.resident_frames(4) * FRAME_BYTES
    runtime = tiny_runtime(model, 800, RuntimeConfig(**THRESHOLDS, min_dwell_steps=0, weight_limit_bytes=limit))
    full = runtime.snapshot().mean_bits
    assert 0.8 * limit < runtime.snapshot().weight_bytes <= limit
    ids = runtime.allocate_kv(runtime.arena.free_frames)
    runtime.boundary()
    assert runtime.snapshot().mean_bits < full
    runtime.arena.free(ids)
    for _ in range(60):
        runtime.boundary()
        assert runtime.snapshot().weight_bytes <= limit + int(model.sizes.table_frames.max()) * FRAME_BYTES
    assert runtime.snapshot().mean_bits >= full - 0.2


@pytest.mark.parametrize(
    ("field", "value"), [("weight_limit_bytes", 0), ("damage_limit", -1.0), ("damage_limit", float("nan"))]
)
def test_impossible_limits_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RuntimeConfig(**{field: value})


@pytest.mark.parametrize("background_rows", [0, 10**6], ids=["background", "inline"])
def test_a_runtimes_trace_replays_bit_for_bit(tmp_path, background_rows: int) -> None:
    path = tmp_path / "trace.jsonl"
    config = RuntimeConfig(
        **THRESHOLDS, min_dwell_steps=1, plan_period_steps=2, background_rows=background_rows, trace_path=str(path)
    )
    model = tiny_model()
    arena = Arena((model.resident_frames(6) + 40) * FRAME_BYTES, FRAME_BYTES)
    stats = RoutingStats.zeros(2, 2, 3)
    policy = random_policy(model.layout).replaced(
        head_weights=np.random.default_rng(0).normal(size=(2, 4, 4, 3)), head_confidence=np.ones((2, 4, 4)), alpha=0.5
    )
    gauge_free = [20]
    gauge = CallableGauge(lambda: KVState(gauge_free[0], 4 * FRAME_BYTES))
    runtime = Runtime(model.layout, model.host, arena, policy, config, ImmediateEngine(arena), gauge, stats)
    rng = np.random.default_rng(1)
    for step in range(60):
        stats.mass.add_(torch.rand(2, 2, 3))
        stats.counts.add_(1)
        stats.features.add_(torch.rand(2, 2, 3, 2, 3))
        gauge_free[0] = 40 if step > 40 else int(rng.integers(0, 12))
        settled(runtime)
    runtime.close()
    with path.open(encoding="utf-8") as lines:
        steps = list(replay(lines, policy))
    assert all(step.same for step in steps)
    assert any(step.recorded.released_bytes > 0 for step in steps)
    assert any(step.recorded.released_bytes < 0 for step in steps)
    verbs = {line.split('"verb": "')[1].split('"')[0] for line in path.read_text("utf-8").splitlines()[1:]}
    assert verbs == ({"lower", "raise", "choose"} if background_rows == 0 else {"lower", "raise"})


def test_a_trace_is_closed_when_the_runtime_cannot_be_made(tmp_path) -> None:
    model = tiny_model()
    config = RuntimeConfig(trace_path=str(tmp_path / "trace.jsonl"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="raise the budget"):
            tiny_runtime(model, 1, config)
        gc.collect()
    assert not [warning for warning in seen if warning.category is ResourceWarning]


def test_a_requests_confidence_and_bounds_reach_the_plan() -> None:
    """A request whose features are not trusted, or clipped to nothing, leaves its prompt's residual out."""

    def lowered(**request: object) -> np.ndarray:
        model = tiny_model(experts=(4,))
        stats = RoutingStats.zeros(2, 1, 4)
        stats.mass[:] = 1.0
        stats.counts[:] = 100
        stats.features[0, 0, 0] = 40.0  # expert 0, which would be the cheapest, matters to this prompt
        rows = model.layout.rows
        policy = random_policy(model.layout)
        policy = policy.replaced(
            s_bar=np.tile(policy.s_bar[:1], (rows, 1)) * np.repeat([0.9, 1.0, 1.1, 1.2], 2)[:, None],
            head_weights=np.full((2, 4, 4, 3), 0.1),
            head_confidence=np.ones((2, 4, 4)),
            alpha=1.0,
        )
        arena = Arena(400 * FRAME_BYTES, FRAME_BYTES)
        gauge = CallableGauge(lambda: KVState(0, 2 * FRAME_BYTES))
        config = RuntimeConfig(**THRESHOLDS, max_requests=2)
        runtime = Runtime(model.layout, model.host, arena, policy, config, ImmediateEngine(arena), gauge, stats)
        if request:
            runtime.set_request(0, **request)
        runtime.boundary(request_kv=np.array([50, 1], dtype=np.float32))
        return np.flatnonzero(runtime.snapshot().bits < 6) // 2

    assert 0 not in lowered()
    assert 0 in lowered(confidence=0.0)
    assert 0 in lowered(rho_bounds=(0.0, 0.0))
    assert 0 not in lowered(confidence=1.0)


def test_what_is_said_of_a_request_is_checked_and_ends_with_it() -> None:
    model = tiny_model(experts=(4,))
    stats = RoutingStats.zeros(2, 1, 4)
    arena = Arena(400 * FRAME_BYTES, FRAME_BYTES)
    policy = random_policy(model.layout)
    runtime = Runtime(model.layout, model.host, arena, policy, RuntimeConfig(), ImmediateEngine(arena), None, stats)
    for slot, request in ((2, {}), (0, {"confidence": 1.5}), (0, {"rho_bounds": (1.0, 0.0)})):
        with pytest.raises(ValueError, match=r"slot 2|confidence|rho_bounds"):
            runtime.set_request(slot, **request)
    runtime.set_request(1, confidence=0.5, rho_bounds=(0.0, 0.5))
    assert runtime._signals.refresh().merged.rho_bounds is not None
    runtime.begin_requests(2)
    assert runtime._signals.refresh().merged.rho_bounds is None


def test_explain_says_why_what_it_cost_and_what_more_room_would_do() -> None:
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40)
    assert "in damage per byte its next costs" in runtime.explain(1, 0, "gate_up")
    runtime.allocate_kv(runtime.arena.free_frames)
    runtime.boundary()
    row = int(np.flatnonzero(runtime.snapshot().bits < 6)[0])
    told = runtime.explain(*list(model.layout.blocks())[row])
    assert "lowered from 6 to" in told
    assert "predicted damage" in told
    assert f"freeing {2**30} bytes" in told
    with pytest.raises(KeyError, match="gate_up or down"):
        runtime.explain(1, 0, "up")
    with pytest.raises(KeyError):
        runtime.explain(9, 0, "down")


def test_a_model_of_one_width_has_nothing_to_plan() -> None:
    model = tiny_model(widths=(4,))
    runtime = tiny_runtime(model, model.resident_frames(4) + 20, RuntimeConfig(**THRESHOLDS))
    for pending_blocks in (0, 4, 40):
        runtime.boundary(pending_blocks=pending_blocks)
    assert (runtime.snapshot().bits == 4).all()
    assert runtime.snapshot().shortfall_bytes > 0
    runtime.check()


def test_bursts_at_regular_times_move_a_row_once_more_at_most() -> None:
    """Room between two bursts is left alone once the second has shown that there is a rhythm; afterwards all rises."""
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, RuntimeConfig(**THRESHOLDS))
    frames, bits = runtime.arena.free_frames + 60, [runtime.snapshot().bits]
    for step in range(400):
        if step % 25 == 0 and step < 300:
            burst = runtime.allocate_kv(frames)
        if step % 25 == 12 and step < 300:
            runtime.arena.free(burst)
        runtime.boundary()
        bits.append(runtime.snapshot().bits)
    assert (bits[-1] == 6).all()
    way = np.sign(np.diff(bits, axis=0)).T
    turns = [np.count_nonzero(np.diff(moves[moves != 0])) for moves in way]
    assert max(turns) <= 3  # down, up, down with the second burst, up for good


def test_rows_that_rose_and_fell_come_back_first_again() -> None:
    """The last raise before pressure was not refused, even if its rows are where they were when it was asked for."""
    model = tiny_model(experts=(6,), widths=(2, 3))
    config = RuntimeConfig(offload_free_blocks=1, reload_free_blocks=2, min_dwell_steps=0, plan_period_steps=1)
    runtime = tiny_runtime(model, model.resident_frames(3) + 60, config, block_frames=1)
    held, raised = runtime.allocate_kv(runtime.arena.free_frames), []
    for _ in range(3):
        while not runtime.idle or (runtime.snapshot().bits > 2).any():
            held = np.concatenate([held, runtime.allocate_kv(runtime.arena.free_frames)])
            runtime.boundary()
        held = np.concatenate([held, runtime.allocate_kv(runtime.arena.free_frames)])
        runtime.arena.free(held[:14])
        held, table = held[14:], runtime._table
        for _ in range(64):  # room has to last longer each time
            runtime.boundary()
            if (table.desired > table.committed).any():
                break
        raised.append(np.flatnonzero(table.desired > table.committed).tolist())
    assert raised[0]
    assert raised[1:] == raised[:1] * 2


@pytest.mark.parametrize("period", [1, 4])
def test_statistics_are_read_at_whole_periods_and_oftener_near_pressure(period):
    stats, free = RoutingStats.zeros(1, 2, 3), [1000]
    config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, plan_period_steps=period)
    arena, model = Arena(400 * FRAME_BYTES, FRAME_BYTES), tiny_model()
    gauge = CallableGauge(lambda: KVState(free[0], FRAME_BYTES))
    runtime = Runtime(
        model.layout, model.host, arena, random_policy(model.layout), config, ImmediateEngine(arena), gauge, stats
    )
    seen = []
    for boundary in range(1, 40 * period):
        free[0] = 1000 if boundary <= 10 * period + 1 else 3
        stats.mass[0, 0, 0] = boundary
        runtime.boundary()
        landed = runtime._signals.landed
        seen.append(0 if landed is None else int(landed._stats.mass[0, 0, 0]))
    read_at = sorted(set(seen))
    assert len(read_at) >= 4
    assert all(boundary % period == 0 for boundary in read_at[1:])


def test_plans_taken_one_after_the_other_come_from_one_planner_step():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40, BACKGROUND)
    runtime.set_bits(6)
    table, pager = runtime._table, runtime._pager
    queue = ReadyQueue(table, runtime.policy, PlanWorker(background=True), None)
    calm = Observation(KVState(100, FRAME_BYTES))
    queue.refresh(lambda seen: lambda: calm)
    queue.take(wait=True)
    pressure = calm._replace(kv=KVState(0, FRAME_BYTES), threshold_blocks=2)
    for taken in (1, 2, 3):
        plan = queue.plan(table.snapshot(), lambda: pressure, pressure)
        assert plan.released_bytes >= 3 * FRAME_BYTES
        pager.lower(plan.transitions)
        table.publish()
        pager.start([])
        pager.settle()
        assert not queue.stale
        assert (queue.ready, queue.made_late) == (taken, 0)
    runtime.close()


def test_after_a_long_quiet_room_has_to_stay_half_as_long():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40)
    planning = runtime._planning
    planning._rhythm.hold_steps = 64  # as pressure that comes back soon after every raise leaves it
    held = []
    while not planning._pager.moves.lowered_rows:
        held.append(runtime.allocate_kv(4))
        runtime.boundary()
    runtime.boundary()
    assert planning._rhythm.hold_steps == 32


def test_room_that_another_engine_takes_while_pages_come_back_has_to_last_anew():
    """A raise takes nothing of its count, so that only the engine itself can have brought it below the threshold."""
    free = [0]
    gauge = CallableGauge(lambda: KVState(free[0], FRAME_BYTES))
    runtime = tiny_runtime(tiny_model(), 400, RuntimeConfig(**THRESHOLDS), gauge=gauge, engine=CrankedEngine)
    runtime.boundary()
    runtime._pager.settle()
    free[0], planning = 1000, runtime._planning
    while not runtime._pager.loading_bytes:
        runtime.boundary()
    assert planning._calm_for > 0
    free[0] = THRESHOLDS["reload_free_blocks"]
    runtime.boundary()
    assert runtime._pager.loading_bytes
    assert planning._calm_for == 0
