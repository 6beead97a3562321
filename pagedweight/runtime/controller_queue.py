"""The plan queue kept ready: refreshed beside the forwards, asked under pressure, never of other widths than these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagedweight.policy import Policy
from pagedweight.runtime.controller_work import PlanWorker
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Plan, Queue, plan_from_queue, plan_step
from pagedweight.runtime.planner_trace import TraceWriter
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import TableSnapshot

Observing = Callable[[], Observation]


class ReadyQueue:
    """Q_t between two planner steps.

    ready, made_late: plans under pressure that the queue held, and those that had to be made at the boundary.
    """

    def __init__(self, table: PageTable, policy: Policy, worker: PlanWorker, trace: TraceWriter | None) -> None:
        self.ready = self.made_late = 0
        self._table = table
        self._policy = policy
        self._worker = worker
        self._trace = trace
        self._queue = Queue()
        self._version: int | None = None
        self._ahead: np.ndarray | None = None
        self._refreshed_at = 0

    @property
    def stale(self) -> bool:
        """Whether its plans lead on from other widths than the present ones: neither from where they start nor from
        where the last one that was taken from them ends."""
        if self._ahead is not None and (self._table.committed == self._ahead).all():
            self._version, self._ahead = self._table.version, None
        return self._version != self._table.version

    @property
    def age_steps(self) -> int:
        return self._table.step - self._refreshed_at

    def plan(self, seen: TableSnapshot, observing: Observing, pressure: Observation) -> Plan:
        """Pi for the present target: from the queue, or, where it has none that fits, from a planner step now.

        pressure: the observation without statistics, which a queued plan's prediction holds already.
        """
        if self._worker.background:
            for wait in (False, True):
                self.take(wait=wait)
                plan = None if self.stale else plan_from_queue(seen, pressure, self._policy, self._queue)
                if plan is not None:
                    return self._taken(seen, pressure, plan)
        plan = self._adopt(*self._step(seen, observing))
        self.made_late += bool(plan.transitions)
        return plan

    def _taken(self, seen: TableSnapshot, pressure: Observation, plan: Plan) -> Plan:
        self.ready += bool(plan.transitions)
        self._ahead = seen.committed.copy()
        self._ahead[[t.row for t in plan.transitions]] = [t.to_bits for t in plan.transitions]
        if self._trace is not None:
            self._trace.chosen(seen, pressure, plan)
        return plan

    def refresh(self, prepare: Callable[[TableSnapshot], Observing]) -> None:
        """A planner step beside the forwards, unless one is under way; prepare: what makes the observation."""
        self._refreshed_at = self._table.step
        self._adopt_if_next(self._worker.ask(self._question(), lambda: self._call(prepare)))

    def take(self, *, wait: bool = False) -> None:
        """Use a planner step that has been done meanwhile; wait: for one that is under way."""
        self._adopt_if_next(self._worker.take(self._question(), wait=wait))

    def _question(self) -> tuple[str, int]:
        return "queue", self._table.version

    def _call(self, prepare: Callable[[TableSnapshot], Observing]) -> Callable[[], tuple]:
        seen = self._table.snapshot()
        observing = prepare(seen)
        return lambda: self._step(seen, observing)

    def _step(self, seen: TableSnapshot, observing: Observing) -> tuple:
        queue, observation = self._queue, observing()
        return queue, seen, observation, *plan_step(seen, observation, self._policy, queue)

    def _adopt_if_next(self, step: tuple | None) -> None:
        """A step taken from an older queue than the present one is too late."""
        if step is not None and step[0] is self._queue:
            self._adopt(*step)

    def _adopt(self, _: Queue, seen: TableSnapshot, observation: Observation, queue: Queue, plan: Plan) -> Plan:
        self._queue, self._version, self._refreshed_at = queue, self._table.version, self._table.step
        self._ahead = None
        if self._trace is not None:
            self._trace.lowered(seen, observation, plan)
        return plan
