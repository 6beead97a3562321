"""When to ask the planner, and for what: lower under pressure, raise when there is room, else keep the queue fresh."""

from __future__ import annotations

import logging

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_signals import SignalReader
from pagedweight.runtime.frames import Arena
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits, Observation, observe
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.planner import Plan, Queue, plan_raise, plan_step
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import TableSnapshot, Transition

_LOG = logging.getLogger(__name__)
_NOTHING = Plan()


class Planning:
    """The hysteresis between offload and reload thresholds, and the plan queue.

    state: what is going on, in words. shortfall_bytes: what the last plan under pressure could not release.
    """

    def __init__(
        self,
        table: PageTable,
        pager: Pager,
        arena: Arena,
        policy: Policy,
        config: RuntimeConfig,
        signals: SignalReader,
    ) -> None:
        self.state = "at rest"
        self.shortfall_bytes = 0
        self._table = table
        self._pager = pager
        self._arena = arena
        self._policy = policy
        self._config = config
        self._signals = signals
        self._queue = Queue()
        self._fruitless: tuple[int, ...] | None = None
        self._forecast_blocks = 0
        self._asked: tuple[Transition, ...] = ()
        self._no_room: set[int] = set()

    def decide(self, kv: KVState, forecast_blocks: int = 0) -> Plan:
        """This boundary's plan. Planning again where nothing has changed since an empty plan waits for the period.

        forecast_blocks: KV blocks expected soon; thresholds and targets take them for gone, as they do pending ones.
        """
        self._forecast_blocks = forecast_blocks
        step, period = self._table.step, self._config.plan_period_steps
        if (step + 1) % period == 0:
            self._signals.refresh(wait=self._config.deterministic)
        situation = self._situation(kv)
        if situation == self._fruitless and step % period:
            return _NOTHING
        if kv.headroom_blocks - forecast_blocks <= self._config.offload_free_blocks:
            plan = self._lowering(kv)
            self._note("short of bytes" if plan.shortfall_bytes else "under pressure", plan.shortfall_bytes, kv)
        else:
            plan = self._raising(kv, due=step % period == 0)
            self._note(self._state_above_pressure(kv), 0, kv)
        self._fruitless = None if plan.transitions else situation
        return plan

    def _situation(self, kv: KVState) -> tuple[int, ...]:
        """All that a plan depends on, but for statistics: free blocks, widths, what is in flight, who may be raised."""
        dwelt = min(self._table.steps_at_rest, self._config.min_dwell_steps)
        headroom_blocks = kv.headroom_blocks - self._forecast_blocks
        return headroom_blocks, self._table.version, self._pager.releasing_bytes, self._pager.loading_bytes, dwelt

    def _lowering(self, kv: KVState) -> Plan:
        seen = self._table.snapshot()
        self._queue, plan = plan_step(seen, self._observe(seen, kv), self._policy, self._queue)
        return plan

    def _raising(self, kv: KVState, *, due: bool) -> Plan:
        """A raise that leaves free blocks above the reload threshold; the queue is refreshed when it is due."""
        available = self._raise_bytes(kv, self._config.reload_free_blocks)
        if available <= 0 or self._table.at_parent_width:
            return self._lowering(kv) if due else _NOTHING
        self._note_refused()
        seen = self._table.snapshot()
        seen.busy[list(self._no_room)] = True
        plan = plan_raise(seen, self._observe(seen, kv), self._policy, available)
        self._asked = self._within(plan.transitions, kv)
        if not self._asked:
            self._no_room.clear()
        return plan._replace(transitions=self._asked)

    def _note_refused(self) -> None:
        """Rows of the last raise for which the pager found no run of frames let others try, until none is left."""
        at_rest = self._table.desired == self._table.committed
        self._no_room |= {t.row for t in self._asked if at_rest[t.row] and self._table.committed[t.row] == t.from_bits}
        self._asked = ()

    def _raise_bytes(self, kv: KVState, threshold_blocks: int) -> int:
        """Bytes that raises may take while more free blocks than the threshold stay."""
        loadable = self._config.max_loading_bytes - self._pager.loading_bytes
        return min(kv.bytes_above(threshold_blocks + self._forecast_blocks), self._arena.free_bytes, loadable)

    def _within(self, raising: tuple[Transition, ...], kv: KVState) -> tuple[Transition, ...]:
        """The raises that fit while old tables stay beside the new ones, until the new ones are in use.

        For that short time they may take blocks below the reload threshold, as long as that is no pressure.
        """
        room = self._raise_bytes(kv, self._config.offload_free_blocks)
        kept = []
        for transition, old_table in zip(raising, self._table.slot_bytes(_rows(raising)).tolist(), strict=True):
            needed = transition.bytes + old_table
            if needed <= room:
                kept.append(transition)
                room -= needed
        return tuple(kept)

    def _observe(self, seen: TableSnapshot, kv: KVState) -> Observation:
        return observe(
            seen,
            kv,
            self._config.offload_free_blocks,
            self._signals.refresh(wait=self._config.deterministic),
            in_flight_bytes=self._pager.releasing_bytes,
            forecast_blocks=self._forecast_blocks,
            limits=Limits(dwell_steps=self._config.min_dwell_steps, raise_bytes=self._config.max_loading_bytes),
        )

    def _state_above_pressure(self, kv: KVState) -> str:
        """Pressure is over only above the reload threshold, as movement has it: no change of state at every block."""
        if kv.headroom_blocks - self._forecast_blocks <= self._config.reload_free_blocks:
            return self.state
        return "at rest" if self._table.at_parent_width else "restoring"

    def _note(self, state: str, shortfall_bytes: int, kv: KVState) -> None:
        """One log line for each change of state, however many boundaries it lasts."""
        self.shortfall_bytes = shortfall_bytes
        if state != self.state:
            self.state = state
            _LOG.info("expert weights are %s: %s, shortfall %d bytes", state, kv, shortfall_bytes)


def _rows(moves: tuple[Transition, ...]) -> np.ndarray:
    return np.array([t.row for t in moves], dtype=np.int64)
