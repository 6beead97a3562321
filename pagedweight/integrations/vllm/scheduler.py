"""vLLM's schedulers with expert weights as a tenant of their block pool."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from pagedweight.integrations.vllm import worker_hooks
from pagedweight.integrations.vllm.figures_board import FiguresBoard
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.rank_merge import make_planner, merged_signals
from pagedweight.integrations.vllm.report import Figures, explain, figures
from pagedweight.integrations.vllm.request_slots import RequestSlots
from pagedweight.integrations.vllm.tenant import Tenant

# /metrics are asked for seconds apart; what counts moves is on the board at once.
BOARD_SECONDS = 0.05
# Without pressure a plan is some time off, and so is the need of news.
CALM_PERIODS = 4


class BlockPoolTenancy:
    """The pool as the weights see it; vLLM's own figures of use then leave out the blocks that weights hold."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._total_blocks = pool.num_gpu_blocks
        self._held: dict[int, KVCacheBlock] = {}

    @property
    def free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    def take(self, count: int) -> np.ndarray:
        blocks = self._pool.get_new_blocks(count)
        self._held.update((block.block_id, block) for block in blocks)
        self._pool.num_gpu_blocks = self._total_blocks - len(self._held)
        return np.array([block.block_id for block in blocks], dtype=np.int64)

    def give(self, block_ids: np.ndarray) -> None:
        self._pool.free_blocks([self._held.pop(block_id) for block_id in block_ids.tolist()])
        self._pool.num_gpu_blocks = self._total_blocks - len(self._held)


class WeightsYield:
    """Mixed into a scheduler: weights give blocks up before requests are preempted, and take them back after."""

    def __init__(self, *args: Any, executor: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        self._options = ServingOptions.of(config.additional_config)
        self._executor = executor
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        reports = executor.collective_rpc(worker_hooks.attach, args=(blocks,))
        planner = make_planner(reports, config.model_config.model, self._options)
        self.weights = Tenant(planner, BlockPoolTenancy(self.kv_cache_manager.block_pool), self._options)
        self._resident_bytes = reports[0].resident_bytes
        self._total_blocks = blocks - 1  # one is the null block
        step_blocks = self.max_num_scheduled_tokens // self.block_size + self.max_num_running_reqs
        self._spared_blocks = step_blocks * len(self.kv_cache_config.kv_cache_groups) + self._options.reload_free_blocks
        self._planning_seconds = 0.0
        self._board = FiguresBoard(config.instance_id, write=True)
        self._on_board, self._board_due = None, 0.0
        self._slots = RequestSlots(self._options.statistics_slots)
        self._by_expert_rank = len({report.experts for report in reports}) > 1
        self._signals: Future | None = None
        for commands in self.weights.settle_in():
            executor.collective_rpc(worker_hooks.carry_out, args=(commands,))
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_or_yield

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        start = time.perf_counter()
        self._watch_routing()
        self.weights.begin_step(self._pending_blocks())
        self._planning_seconds += time.perf_counter() - start
        output = super().schedule(*args, **kwargs)
        seating = self._slots.follow(request.request_id for request in self.running)
        setattr(output, worker_hooks.COMMANDS, self.weights.end_step()._replace(seating=seating))
        self._show(start)
        return output

    def add_request(self, request: Request) -> None:
        if self._options.prefix_cache_by_precision and request.request_id not in self.requests:
            salts = [salt for salt in (request.cache_salt, self.weights.precision) if salt]
            request.cache_salt = " at precision ".join(salts) or None
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)

    def shutdown(self) -> None:
        self._board.remove()
        super().shutdown()

    def pagedweight_report(self, block: tuple[int, int, str] | None = None) -> dict[str, Any]:
        """Figures and an explanation, as plain values."""
        return {**self._figures()._asdict(), "explanation": explain(self.weights, block and tuple(block))}

    def _show(self, now: float) -> None:
        """Put figures on the board when a count has changed, else once in a while; what is there when nothing runs any
        more stays there until something does."""
        if not self.running or self.weights.counts is not self._on_board or now >= self._board_due:
            self._board.write(self._figures())
            self._on_board, self._board_due = self.weights.counts, now + BOARD_SECONDS

    def _figures(self) -> Figures:
        return figures(self.weights, self._total_blocks, self._resident_bytes, self._planning_seconds)

    def _allocate_or_yield(self, *args: Any, **kwargs: Any) -> Any:
        """allocate_slots; where it fails, weights give up twice as many blocks as the time before, and it is tried
        again, until they have none."""
        found, blocks = self._allocate_slots(*args, **kwargs), 1
        while found is None and self._rescue(blocks):
            found, blocks = self._allocate_slots(*args, **kwargs), 2 * blocks
        return found

    def _rescue(self, blocks: int) -> bool:
        start = time.perf_counter()
        rescued = self.weights.rescue(blocks)
        self._planning_seconds += time.perf_counter() - start
        return rescued

    def _pending_blocks(self) -> int:
        """Blocks that running requests will write into next, and that waiting ones would need to start; 0 while no
        width can rise and a step could take no block that weights would have to give."""
        weights = self.weights
        if weights.planner.at_parent_width and weights.free_blocks > self._spared_blocks:
            return 0
        groups = len(self.kv_cache_config.kv_cache_groups)
        size, budget = self.block_size, self.max_num_scheduled_tokens
        pending = 0
        for request in self.running:
            computed = request.num_computed_tokens
            coming = request.num_tokens_with_spec + request.num_output_placeholders - computed
            coming = max(0, min(coming, budget))
            budget -= coming
            pending += -(-(computed + coming) // size) - -(-computed // size)
        seats = self.max_num_running_reqs - len(self.running)
        for request in self.waiting:
            if seats <= 0 or budget <= 0:
                break
            pending += -(-request.num_tokens // size)
            budget -= request.num_tokens
            seats -= 1
        return pending * groups

    def _watch_routing(self) -> None:
        """Statistics asked for some steps ago become the planner's; a new reading is asked for when it is time."""
        if self._signals is not None and self._signals.done():
            signals = merged_signals(self._signals.result(), by_expert_rank=self._by_expert_rank)
            if signals is not None:
                self.weights.planner.signals = signals
            self._signals = None
        period = self._options.statistics_period_steps * (CALM_PERIODS if self.weights.planner.at_parent_width else 1)
        if self._signals is None and self.weights.planner.step % period == 0:
            log_features = self.weights.planner.policy.feature_transform == "log"
            arguments = log_features, self._slots.kv_blocks(self._blocks_of)
            self._signals = self._executor.collective_rpc(worker_hooks.read_signals, args=arguments, non_block=True)

    def _blocks_of(self, request: str) -> int:
        return sum(map(len, self.kv_cache_manager.get_block_ids(request)))


class PagedScheduler(WeightsYield, Scheduler):
    """Each step is scheduled after the one before it."""


class PagedAsyncScheduler(WeightsYield, AsyncScheduler):
    """A step is scheduled while the one before it runs."""


def scheduler_class(async_scheduling: bool) -> type[Scheduler]:
    return PagedAsyncScheduler if async_scheduling else PagedScheduler
