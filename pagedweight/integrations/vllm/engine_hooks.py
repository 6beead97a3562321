"""What runs in vLLM's engine process: paged experts get the scheduler that knows of them."""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore

from pagedweight.integrations.vllm.options import KEY, ServingOptions
from pagedweight.integrations.vllm.report import RPC
from pagedweight.integrations.vllm.scheduler import WeightsYield, scheduler_class


def install() -> None:
    """Choose the scheduler once KV blocks exist; installing again changes nothing."""
    original = EngineCore._initialize_kv_caches
    if hasattr(original, "__wrapped__") and original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=())
    def initialize(self: EngineCore, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        result = original(self, vllm_config, *args, **kwargs)
        # Not EngineCore.__init__: in an engine process of its own this is installed while that runs.
        if vllm_config.model_config.quantization == KEY:
            _choose_scheduler(vllm_config, self.model_executor)
        return result

    def report(self: EngineCore, block: Any = None) -> dict[str, Any]:
        if not isinstance(self.scheduler, WeightsYield):
            return {
                "explanation": "widths are fixed: the model was loaded with pagedweight.bits, or without pagedweight"
            }
        return self.scheduler.pagedweight_report(block)

    EngineCore._initialize_kv_caches = initialize
    setattr(EngineCore, RPC, report)


def _choose_scheduler(config: VllmConfig, executor: Any) -> None:
    if ServingOptions.of(config.additional_config).bits is not None:
        return
    if config.scheduler_config.scheduler_cls is not None:
        raise ValueError(
            f"scheduler_cls is {config.scheduler_config.scheduler_cls}; paged experts bring their own scheduler: leave "
            "it out, or serve at fixed pagedweight.bits"
        )
    chosen = scheduler_class(bool(config.scheduler_config.async_scheduling))
    config.scheduler_config.scheduler_cls = functools.partial(chosen, executor=executor)
