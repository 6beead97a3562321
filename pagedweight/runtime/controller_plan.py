"""When to ask the planner, and for what: lower under pressure, raise when there is room, else keep the queue fresh."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_queue import ReadyQueue
from pagedweight.runtime.controller_raise import RaiseLimits
from pagedweight.runtime.controller_rhythm import Rhythm
from pagedweight.runtime.controller_signals import SignalReader
from pagedweight.runtime.controller_work import PlanWorker
from pagedweight.runtime.frames import Arena
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits, Observation, observe
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.planner import Plan, plan_raise
from pagedweight.runtime.planner_scores import damage_now_and_at_floor
from pagedweight.runtime.planner_trace import TraceWriter
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import TableSnapshot

_LOG = logging.getLogger(__name__)
_NOTHING = Plan()
# Statistics and queue grow old for so many periods: asking costs a forward about 0.3 ms, and signals drift slowly.
_SHORTEST_WAIT_PERIODS, _LONGEST_WAIT_PERIODS = 8, 32


class Planning:
    """The hysteresis between offload and reload thresholds, and the plan queue.

    state: what is going on, in words. shortfall_bytes: what the last plan under pressure could not release.
    queue: the plan queue, with how many plans it had ready.
    """

    def __init__(
        self,
        table: PageTable,
        pager: Pager,
        arena: Arena,
        policy: Policy,
        config: RuntimeConfig,
        signals: SignalReader,
        limits: Limits,
        trace: TraceWriter | None = None,
        *,
        shared: bool = True,
    ) -> None:
        """shared: whether the KV gauge counts the arena itself, so that what is released shows at once."""
        self.state = "at rest"
        self.shortfall_bytes = 0
        self._table = table
        self._pager = pager
        self._policy = policy
        self._config = config
        self._signals = signals
        self._limits = limits
        self._trace = trace
        self._shared = shared
        background = len(table.committed) >= config.background_rows and not config.deterministic
        self._worker = PlanWorker(background=background)
        self.queue = ReadyQueue(table, policy, self._worker, trace)
        self._raises = RaiseLimits(table, pager, arena, config)
        self._rhythm = Rhythm(table, pager)
        self._signals_at = 0
        self._fruitless: tuple[int, ...] | None = None
        self._forecast_blocks = 0
        self._answered: tuple[KVState, int] | None = None
        self._pressed_for = 0
        self._calm_for = 0

    def decide(self, kv: KVState, forecast_blocks: int = 0) -> Plan:
        """This boundary's plan. Planning again where nothing has changed since an empty plan waits for the period.

        forecast_blocks: KV blocks expected soon; thresholds and targets take them for gone, as they do pending ones.
        """
        self._forecast_blocks = forecast_blocks
        self._raises.begin()
        self._rhythm.learn()
        step, period = self._table.step, self._config.plan_period_steps
        if (step + 1) % period == 0 and step + 1 - self._signals_at >= self._wait_steps(kv):
            self._signals_at = step + 1
            self._signals.refresh(wait=self._config.deterministic)
        pressed = kv.headroom_blocks - forecast_blocks <= self._config.offload_free_blocks
        self._pressed_for = self._pressed_for + 1 if pressed else 0
        if kv.headroom_blocks - forecast_blocks > self._config.reload_free_blocks:
            self._calm_for += 1
        elif pressed or self._pager.idle or not self._shared:  # else a raise's old tables may stand beside the new
            self._calm_for = 0
        situation = self._situation(kv)
        if situation == self._fruitless and step % period:
            return _NOTHING
        if pressed:
            plan = self._lowering(kv)
            short = self.shortfall_bytes if plan is None else plan.shortfall_bytes
            self._note("short of bytes" if short else "under pressure", short, kv)
        else:
            plan = self._raising(kv, due=step % period == 0)
            self._note(self._state_above_pressure(kv), 0, kv)
        self._fruitless = None if plan is None or plan.transitions else situation
        return plan or _NOTHING

    def observe(self, seen: TableSnapshot, kv: KVState, *, ask: bool = True) -> Observation:
        """What the planner sees now. ask: for statistics where none have landed; otherwise the device is left alone."""
        return self._prepare(seen, kv, ask=ask)()

    def within_limits(self, rows: np.ndarray) -> np.ndarray:
        """Of rows that an emergency would drop to the floor, in this order, those that pins and quality budget let."""
        pins, most_damage = self._limits.lowest_bits, self._limits.damage
        if pins is not None:
            rows = rows[pins[rows] <= self._table.floor]
        if most_damage == math.inf:
            return rows
        seen = self._table.snapshot()
        now, at_floor = damage_now_and_at_floor(seen, self.observe(seen, KVState(0, 1)), self._policy)
        return rows[np.cumsum((at_floor - now)[rows]) <= most_damage - now.sum()]

    def explain(self, kv: KVState | None) -> str:
        """What is being done and why; kv: the last reading."""
        return (
            f"{self.state}: {kv}, offload at {self._config.offload_free_blocks} free blocks or fewer, "
            f"reload above {self._config.reload_free_blocks}; shortfall {self.shortfall_bytes} bytes; "
            f"{self.queue.ready} plans were ready, {self.queue.made_late} made at their boundary; "
            f"{self._pager.moves}"
        )

    def close(self) -> None:
        self._worker.close()
        if self._trace is not None:
            self._trace.close()

    def _situation(self, kv: KVState) -> tuple[int, ...]:
        """All that a plan depends on, but for statistics: free blocks, widths, what is in flight, who may be raised."""
        dwelt = min(self._table.steps_at_rest, self._config.min_dwell_steps)
        headroom_blocks = kv.headroom_blocks - self._forecast_blocks
        return headroom_blocks, self._table.version, self._pager.releasing_bytes, self._pager.loading_bytes, dwelt

    def _pressure(self, kv: KVState) -> dict[str, object]:
        """Observation's fields but for statistics."""
        in_flight = max(self._pager.releasing_bytes, self._unanswered_bytes(kv))
        return {"in_flight_bytes": in_flight, "forecast_blocks": self._forecast_blocks, "limits": self._limits}

    def _lowering(self, kv: KVState) -> Plan | None:
        """The plan that the queue has ready, or, when it has none, one made now; None where the signal is noise."""
        if self._is_noise(kv):
            return None
        seen = self._table.snapshot()
        pressure = observe(seen, kv, self._config.offload_free_blocks, **self._pressure(kv))
        plan = self.queue.plan(seen, self._prepare(seen, kv), pressure)
        if plan.transitions:
            self._answered = kv, plan.released_bytes
            self._raises.forget_refused()
        return plan

    def _prepare(self, seen: TableSnapshot, kv: KVState, *, ask: bool = True) -> Callable[[], Observation]:
        """What makes the observation; merging and converting the statistics is left to the planner's thread."""
        reading = self._signals.latest(wait=self._config.deterministic) if ask else self._signals.landed
        pressure = self._pressure(kv)
        threshold = self._config.offload_free_blocks
        return lambda: observe(seen, kv, threshold, None if reading is None else reading.merged, **pressure)

    def _is_noise(self, kv: KVState) -> bool:
        """Whether another engine's count swings around the threshold rather than falls.

        It cannot show what weights have released before that engine takes it: after an answer pressure has to last, or
        to get worse than what was answered, to be answered again.
        """
        if self._shared or self._answered is None:
            return False
        return self._pressed_for < 2 and kv.headroom_blocks >= self._answered[0].headroom_blocks

    def _unanswered_bytes(self, kv: KVState) -> int:
        """Bytes of the last lowering while another engine's count still reads as it did then."""
        return self._answered[1] if not self._shared and self._answered and self._answered[0] == kv else 0

    def _raising(self, kv: KVState, *, due: bool) -> Plan | None:
        """A raise that leaves free blocks above the reload threshold, None while it is being planned.

        Where there is nothing to raise the queue is refreshed when it is due, or no longer fits the widths.
        """
        available = self._raises.available_bytes(kv, self._forecast_blocks)
        if available <= 0 or self._calm_for < self._rhythm.hold_steps or self._raises.at_parent_width:
            self.queue.take()
            outdated = self._worker.background and self.queue.stale
            if outdated or (due and self.queue.age_steps >= self._wait_steps(kv)):
                self.queue.refresh(partial(self._prepare, kv=kv))
            return _NOTHING
        asked = self._worker.ask(("raise", self._table.version), lambda: self._raise_call(kv, available))
        if asked is None:
            return None
        *made_for, plan = asked
        if self._trace is not None:
            self._trace.raised(*made_for, plan)
        raising = self._raises.within(plan.transitions, kv, self._forecast_blocks, available)
        if raising:
            self._answered = None
            self._rhythm.raised()
        else:
            self._raises.forget_refused()
        return plan._replace(transitions=raising)

    def _raise_call(self, kv: KVState, available: int) -> Callable[[], tuple]:
        seen = self._raises.candidates()
        observing, policy = self._prepare(seen, kv), self._policy

        def call() -> tuple:
            observation = observing()
            return seen, observation, available, plan_raise(seen, observation, policy, available)

        return call

    def _wait_steps(self, kv: KVState) -> int:
        """Boundaries that statistics and queue may be old: the nearer pressure is, the fewer."""
        reaches = 2 * kv.headroom_blocks // self._config.reload_free_blocks
        periods = min(max(_SHORTEST_WAIT_PERIODS, reaches), _LONGEST_WAIT_PERIODS)
        return periods * self._config.plan_period_steps

    def _state_above_pressure(self, kv: KVState) -> str:
        """Pressure is over only above the reload threshold, as movement has it: no change of state at every block."""
        if kv.headroom_blocks - self._forecast_blocks <= self._config.reload_free_blocks:
            return self.state
        return "at rest" if self._raises.at_parent_width else "restoring"

    def _note(self, state: str, shortfall_bytes: int, kv: KVState) -> None:
        """One log line for each change of state, however many boundaries it lasts."""
        self.shortfall_bytes = shortfall_bytes
        if state != self.state:
            self.state = state
            _LOG.info("expert weights are %s: %s, shortfall %d bytes", state, kv, shortfall_bytes)
