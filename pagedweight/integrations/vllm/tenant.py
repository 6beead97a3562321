"""The weights as one tenant of the engine's block pool: what happens to them in one scheduling step, in order."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from pagedweight.integrations.vllm.block_planner import BlockPlanner
from pagedweight.integrations.vllm.commands import FrameSpots, Round, StepCommands, Widths
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.runtime.kv import KVState, target_bytes

_LOG = logging.getLogger("vllm.pagedweight")  # where vLLM's own log goes


class Pool(Protocol):
    """The engine's free KV blocks."""

    @property
    def free_blocks(self) -> int: ...

    def take(self, count: int) -> np.ndarray:
        """Ids of blocks that are the weights' from now on; there are that many free ones."""
        ...

    def give(self, block_ids: np.ndarray) -> None: ...


class Counts(NamedTuple):
    """Since the start: rows lowered and raised, frames moved on the device, blocks given and taken, steps in which
    weights yielded inside a failed allocation."""

    lowered: int = 0
    raised: int = 0
    moved_frames: int = 0
    blocks_given: int = 0
    blocks_taken: int = 0
    rescues: int = 0


class Tenant:
    """Offload and reload between two steps. Every command is for all ranks alike.

    A block that is given up serves KV in the same step: its frames' last readers were launched before.
    shortfall_bytes: what the last plan under pressure could not release. lowest_mean_bits: the least ever.
    """

    def __init__(self, planner: BlockPlanner, pool: Pool, options: ServingOptions) -> None:
        self.planner = planner
        self.counts = Counts()
        self.shortfall_bytes = 0
        self.lowest_mean_bits = float(planner.layout.parent_width)
        self._pool = pool
        self._options = options
        self._rounds: list[Round] = []
        self._raised, self._loads = Widths(), FrameSpots()
        self._coming: deque[tuple[int, np.ndarray]] = deque()
        self._next_raise = 0
        self._state = ""
        self._episodes = 0

    @property
    def precision(self) -> str:
        """Names the precision that keys and values are computed at now: "" with every width at the parent's, else the
        number of times that widths have left it."""
        return "" if self.planner.at_parent_width else str(self._episodes)

    @property
    def free_blocks(self) -> int:
        return self._pool.free_blocks

    def kv_state(self) -> KVState:
        """Free blocks, without what is pending."""
        return self._state_now(0)

    def describe(self) -> str:
        """What is going on, in words."""
        width = self.planner.tenancy.width
        spread = ", ".join(f"{int((width == bits).sum())} at {bits}" for bits in self.planner.layout.widths)
        return (
            f"expert weights are {self._state or 'at rest'}: {width.mean():.2f} bits ({spread}), {self.kv_state()}, "
            f"offload at {self._options.offload_free_blocks} free blocks or fewer, reload above "
            f"{self._options.reload_free_blocks}; shortfall {self.shortfall_bytes} bytes; {self.counts}"
        )

    def settle_in(self) -> list[StepCommands]:
        """Before serving: load the widths that fit while the reload threshold's blocks stay free, then use them."""
        blocks = max(0, self._pool.free_blocks - self._options.reload_free_blocks - 1)
        bits = self.planner.initial_bits(blocks)
        rows = np.flatnonzero(bits > self.planner.tenancy.width)
        rise = Widths(rows, bits[rows])
        self._take(self.planner.blocks_needed(rise))
        loads = self.planner.load(rise, in_order=True)
        return [StepCommands(loads=loads), StepCommands(raised=self.planner.raised(rows))]

    def begin_step(self, pending_blocks: int) -> None:
        """Widths whose frames have come rise; then, as KV has it, weights give blocks up or take some back.

        pending_blocks: what running and waiting requests will want next.
        """
        self.planner.step += 1
        self._raised = self._land()
        kv = self._state_now(pending_blocks)
        if target_bytes(kv, self._options.offload_free_blocks):
            # Up to the other threshold at once: a plan for each block would cost more time than it saves bits.
            self._give_up(self._options.reload_free_blocks - kv.headroom_blocks, kv)
        else:
            self.shortfall_bytes = 0
            self._rise(kv)
        self._note(kv)

    def rescue(self, blocks: int) -> bool:
        """In a failed allocation, before a request is preempted: whether any block could be had."""
        kv = self._state_now(0)
        given = self._give_up(blocks, kv)
        if not given and len(self.planner.tenancy.loading):
            self._append(self.planner.abandon_loads())
            self._loads = FrameSpots()  # all of this step's are among them
            given = self._give_up(blocks, kv)
        self._count(rescues=int(given > 0))
        return given > 0

    def end_step(self) -> StepCommands:
        """What the ranks must do before this step."""
        commands = StepCommands(self.planner.step, self._raised, tuple(self._rounds), self._loads)
        self._rounds, self._raised, self._loads = [], Widths(), FrameSpots()
        return commands

    def _land(self) -> Widths:
        landed = []
        while self._coming and self._coming[0][0] <= self.planner.step:
            landed.append(self._coming.popleft()[1])
        if not landed:
            return Widths()
        raised = self.planner.raised(np.concatenate(landed))
        self._count(raised=len(raised.row))
        return raised

    def _give_up(self, blocks: int, kv: KVState) -> int:
        self._episodes += self.planner.at_parent_width
        given = self.planner.give_up(blocks, kv)
        self._append(given.round)
        self.shortfall_bytes = given.shortfall_bytes
        self._pool.give(given.block_ids)
        self._count(blocks_given=len(given.block_ids))
        return len(given.block_ids)

    def _append(self, done: Round) -> None:
        if len(done.lower.row) or done.moves.frames:
            self._rounds.append(done)
            self.lowest_mean_bits = min(self.lowest_mean_bits, float(self.planner.tenancy.width.mean()))
            self._count(lowered=len(done.lower.row), moved_frames=len(done.moves.block))

    def _rise(self, kv: KVState) -> None:
        """Start loads within the blocks above the reload threshold, no more at once than the options let, and none
        while others are on their way: a plan costs the engine more time than a load costs the device."""
        spare = kv.headroom_blocks - self._options.reload_free_blocks - 1
        if spare < 0 or self._coming or self.planner.step < self._next_raise:
            return
        most = max(self._options.reload_blocks, self.planner.tenancy.blocks_of_largest_page)
        rise = self.planner.rise_within(min(spare, most), kv)
        if not len(rise.row):
            self._next_raise = self.planner.step + self._options.plan_period_steps
            return
        self._take(self.planner.blocks_needed(rise))
        self._loads = self.planner.load(rise)
        self._coming.append((self.planner.step + self._options.settle_steps, rise.row))

    def _take(self, blocks: int) -> None:
        self.planner.tenancy.add_blocks(self._pool.take(blocks))
        self._count(blocks_taken=blocks)

    def _state_now(self, pending_blocks: int) -> KVState:
        return KVState(self._pool.free_blocks, self.planner.block_bytes, pending_blocks)

    def _count(self, **more: int) -> None:
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + n for name, n in more.items()})

    def _note(self, kv: KVState) -> None:
        """One log line for each change of what is going on."""
        if kv.headroom_blocks <= self._options.offload_free_blocks:
            state = "giving way" if not self.shortfall_bytes else "at their lowest"
        elif kv.headroom_blocks <= self._options.reload_free_blocks:
            return
        else:
            state = "at the parent width" if self.planner.at_parent_width else "coming back"
        if state != self._state:
            self._state = state
            mean_bits = float(self.planner.tenancy.width.mean())
            _LOG.info("expert weights are %s: %.2f bits, %s, %s", state, mean_bits, kv, self.counts)
