"""Which widths fall when KV blocks are needed, and which rise when there are blocks to spare: the planner's choice,
carried out on a Tenancy. No engine and no device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.integrations.vllm.commands import FrameSpots, Round, Widths
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.tenancy import Tenancy
from pagedweight.layout import Layout
from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Limits, Observation, Signals, observe
from pagedweight.runtime.planner import Queue, initial_bits, plan_raise, plan_step
from pagedweight.runtime.planner_explain import explain
from pagedweight.runtime.planner_scores import lowest_index, score_actions
from pagedweight.runtime.planner_stages import legal_steps
from pagedweight.runtime.table_view import TableSnapshot, Transition


class GivenUp(NamedTuple):
    """Blocks that weights hold no longer, and what every rank must do first. shortfall_bytes: what lacks."""

    block_ids: np.ndarray
    round: Round
    shortfall_bytes: int


class BlockPlanner:
    """Planner, policy and live statistics over one Tenancy. step: boundaries so far."""

    def __init__(
        self, layout: Layout, policy: Policy, tenancy: Tenancy, frame_bytes: int, options: ServingOptions
    ) -> None:
        policy.check_layout(layout)
        self.layout = layout
        self.policy = policy
        self.tenancy = tenancy
        self.frame_bytes = frame_bytes
        self.block_bytes = frame_bytes * tenancy.frames_per_block
        self.signals: Signals | None = None
        self.step = 0
        self._options = options
        self._queue = Queue()
        self._changed_at = np.zeros(layout.rows, dtype=np.int64)
        self._identity = _identities(layout)
        self._bytes = tenancy.plane_frames[:, None] * np.array(layout.widths) * frame_bytes

    @property
    def at_parent_width(self) -> bool:
        return self.tenancy.whole

    def snapshot(self) -> TableSnapshot:
        width, coming = self.tenancy.width, self.tenancy.coming
        since = self.step - self._changed_at
        return TableSnapshot(
            self.layout.widths, width.copy(), coming.copy(), self._bytes, coming > width, since, *self._identity
        )

    def initial_bits(self, blocks: int) -> np.ndarray:
        """(R,) widths that fit into so many blocks, before anything is known of the traffic."""
        resident = int(self.tenancy.plane_frames.sum()) * self.tenancy.resident_width * self.frame_bytes
        return initial_bits(self.snapshot(), self.policy, resident + blocks * self.block_bytes)

    def give_up(self, blocks: int, kv: KVState) -> GivenUp:
        """Lower what the planner would lower for `blocks` more KV blocks, and vacate as many, or what can be had."""
        if not self.tenancy.held_blocks:
            return GivenUp(np.empty(0, dtype=np.int64), Round(), blocks * self.block_bytes)
        empty_bytes = self.tenancy.empty_frames * self.frame_bytes
        lower, shortfall = Widths(), 0
        if blocks * self.block_bytes > empty_bytes:
            wanted = KVState(0, self.block_bytes)
            seen = self.snapshot()
            observation = self._observe(seen, wanted, blocks - 1, in_flight_bytes=empty_bytes)
            self._queue, plan = plan_step(seen, observation, self.policy, self._queue)
            lower, shortfall = _widths(plan.transitions), plan.shortfall_bytes
            self.tenancy.lower(*lower)
            self._changed_at[lower.row] = self.step
        block_ids, moves = self.tenancy.vacate(blocks)
        return GivenUp(block_ids, Round(lower, moves), shortfall)

    def abandon_loads(self) -> Round:
        """Rows that are loading stay as they are; their places are empty."""
        rows = self.tenancy.loading
        lower = Widths(rows, self.tenancy.width[rows])
        self.tenancy.lower(*lower)
        return Round(lower)

    def rise_within(self, blocks: int, kv: KVState) -> Widths:
        """The raises that `blocks` more blocks and the empty places allow, by the damage that they take back."""
        if self.at_parent_width:
            return Widths()
        room = blocks * self.block_bytes + self.tenancy.empty_frames * self.frame_bytes
        if room <= 0:
            return Widths()
        seen = self.snapshot()
        return _widths(plan_raise(seen, self._observe(seen, kv, 0), self.policy, room).transitions)

    def blocks_needed(self, rise: Widths) -> int:
        missing = self.tenancy.frames_needed(*rise) - self.tenancy.empty_frames
        return max(0, -(-missing // self.tenancy.frames_per_block))

    def load(self, rise: Widths, *, in_order: bool = False) -> FrameSpots:
        """Take places for what rises; it is in use after `raised`. in_order: lay pages out as they would fall."""
        return self.tenancy.place(*rise, self.give_up_order() if in_order else None)

    def raised(self, rows: np.ndarray) -> Widths:
        """Rows of an earlier load whose frames are there now, less those that were given up meanwhile."""
        rows = rows[self.tenancy.coming[rows] > self.tenancy.width[rows]]
        self.tenancy.raised(rows)
        self._changed_at[rows] = self.step
        return Widths(rows, self.tenancy.width[rows])

    def give_up_order(self) -> np.ndarray:
        """int64 (R, P - resident width): each page's turn if every width fell from the parent, cheapest first."""
        seen = self.snapshot()
        parent = np.full_like(seen.committed, self.layout.parent_width)
        seen = seen._replace(committed=parent, desired=parent, busy=np.zeros_like(seen.busy))
        observation = self._observe(seen, KVState(0, 1), 0)
        scores = score_actions(seen, observation, self.policy)
        steps = legal_steps(scores, lowest_index(scores, seen, observation, self.policy, -1, -1))
        units = self.layout.parent_width - self.tenancy.resident_width
        turn = np.full((self.layout.rows, units), len(steps.row), dtype=np.int64)
        at = scores.committed.copy()
        for number, (row, to) in enumerate(zip(steps.row.tolist(), steps.to.tolist(), strict=True)):
            low, high = self.layout.widths[to], self.layout.widths[at[row]]
            turn[row, low - self.tenancy.resident_width : high - self.tenancy.resident_width] = number
            at[row] = to
        return turn

    def explain(self, row: int, kv: KVState) -> str:
        seen = self.snapshot()
        return str(explain(seen, self._observe(seen, kv, 0), self.policy, row, self.block_bytes))

    def _observe(self, seen: TableSnapshot, kv: KVState, threshold: int, **rest: int) -> Observation:
        limits = Limits(dwell_steps=self._options.min_dwell_steps)
        return observe(seen, kv, threshold, self.signals, limits=limits, **rest)


def _widths(transitions: tuple[Transition, ...]) -> Widths:
    rows = np.array([t.row for t in transitions], dtype=np.int64)
    return Widths(rows, np.array([t.to_bits for t in transitions], dtype=np.int64))


def _identities(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 (R,) each: layer index, expert, projection."""
    counts = [(index, layer.experts) for index, layer in enumerate(layout.moe_layers)]
    layer = np.concatenate([np.full(2 * experts, index) for index, experts in counts])
    expert = np.concatenate([np.arange(experts).repeat(2) for _, experts in counts])
    return layer, expert, np.tile([0, 1], len(layer) // 2)
