"""Compiles a layer's kernels side by side before they are needed: each takes seconds, and every batch size has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch
import triton

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.launch import can_decode
from pagedweight.kernels.decode.launches import decode_launches
from pagedweight.kernels.prefill.config import PrefillConfig, can_prefill

WORKERS = 8


def compile_kernels(
    call: Call, batches: Sequence[int], progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Compile what `fused_moe` launches for calls like this one at each batch size; returns how many launches.

    call: its batch says H, A and the types of x, ids and weights, nothing else. Layers of one shape share kernels: call
    it for one of them. Nothing runs on the device. The grouped kernels, which serve what neither other path does, are
    left out. progress: called with (kernels compiled, kernels to compile), from this thread.
    """
    with torch.cuda.device(call.x.device):
        launches = []
        for tokens in batches:
            sized = call.with_batch(*(tensor.new_empty(tokens, *tensor.shape[1:]) for tensor in call[:4]))
            if can_decode(sized.x):
                launches += decode_launches(sized)[1]
            elif can_prefill(sized.x):
                launches += _prefill_launches(sized)
        with _Compilers(WORKERS) as pool, triton.AsyncCompileMode(pool):
            for launch in launches:
                launch.kernel.warmup(grid=(1,), **launch.arguments)
            progress(0, len(pool.begun))
            for done, _ in enumerate(as_completed(pool.begun), 1):
                progress(done, len(pool.begun))
    return len(launches)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile. begun: what they were given; Triton gives them no kernel twice."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.begun: list[Future] = []

    def submit(self, *call: Any, **named: Any) -> Future:
        self.begun.append(super().submit(*call, **named))
        return self.begun[-1]


def _prefill_launches(call: Call) -> list[Any]:
    # Not at the top: it needs Gluon, which not every Triton has.
    from pagedweight.kernels.prefill import launch
    from pagedweight.kernels.prefill.prepare import Prepared, operand_columns
    from pagedweight.kernels.routing import Grouping

    x = call.x
    grouping = Grouping(*(torch.empty(1, dtype=torch.int32, device=x.device) for _ in Grouping._fields))
    spread, h = (x.new_empty(1, operand_columns(columns)) for columns in (x.shape[1], call.intermediate))
    norms, totals = (torch.empty(1, device=x.device) for _ in range(2))
    prepared = Prepared(grouping, spread, norms, totals, h)
    config = PrefillConfig()
    return [launch.gate_up_launch(call, prepared, config)[-1], launch.down_launch(call, prepared, totals, config)[-1]]
