"""What runs in worker processes: functions that the engine calls on every rank, and the boundary of each step."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
from vllm.v1.worker.worker_base import WorkerWrapperBase

from pagedweight.integrations.vllm.commands import StepCommands
from pagedweight.integrations.vllm.rank_experts import RankExperts, RankReport
from pagedweight.integrations.vllm.versions import watch_batches
from pagedweight.runtime.observe import Signals

# Where a step's commands travel: an attribute of its SchedulerOutput.
COMMANDS = "pagedweight_commands"
_LOG = logging.getLogger("vllm.pagedweight")  # where vLLM's own log goes


def rank_of(worker: WorkerWrapperBase) -> RankExperts:
    return worker.vllm_config.quant_config.rank


def attach(worker: WorkerWrapperBase, blocks: int) -> RankReport:
    """Find frames in the KV cache that this rank has allocated, and follow its batches."""
    runner, rank = worker.worker.model_runner, rank_of(worker)
    report = rank.attach(runner.kv_caches, blocks)
    rank.knows_requests = watch_batches(runner, rank.mark)
    return report


def carry_out(worker: WorkerWrapperBase, commands: StepCommands) -> None:
    """Commands outside any step: before serving, or while nothing runs."""
    rank_of(worker).boundary(commands, 0)


def read_signals(worker: WorkerWrapperBase, log_features: bool, kv_blocks: np.ndarray) -> Signals | None:
    return rank_of(worker).read_signals(log_features, kv_blocks)


def checked_bits(worker: WorkerWrapperBase) -> list[int]:
    """Widths as this rank's kernels see them, once every plane in use has been compared with the host's copy."""
    rank_of(worker).check()
    return rank_of(worker).bits().tolist()


def install() -> None:
    """Make every step begin with its commands; installing again changes nothing."""
    original = WorkerWrapperBase.execute_model
    if hasattr(original, "__wrapped__") and original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=())
    def execute_model(self: WorkerWrapperBase, scheduler_output: Any) -> Any:
        commands = getattr(scheduler_output, COMMANDS, None)
        if commands is not None:
            _boundary(self, commands, scheduler_output.total_num_scheduled_tokens)
        return original(self, scheduler_output)

    WorkerWrapperBase.execute_model = execute_model
    WorkerWrapperBase.pagedweight_checked_bits = checked_bits


def _boundary(worker: WorkerWrapperBase, commands: StepCommands, tokens: int) -> None:
    """Carry commands out, or end this process: a rank that went on with other widths, or that only raised while the
    others already wait for it in the forward, would leave them waiting for ever."""
    carried_out = False
    try:
        rank_of(worker).boundary(commands, tokens)
        carried_out = True
    finally:
        if not carried_out and worker.vllm_config.parallel_config.world_size > 1:
            _LOG.exception("expert pages could not be moved at step %d; the engine ends with this rank", commands.step)
            raise SystemExit(f"expert pages could not be moved at step {commands.step}")
