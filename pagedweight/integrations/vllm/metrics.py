"""Expert weights on vLLM's /metrics (entry point vllm.stat_logger_plugins, loaded by its server)."""

from __future__ import annotations

from typing import Any

import prometheus_client
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from pagedweight.integrations.vllm.figures_board import FiguresBoard
from pagedweight.integrations.vllm.options import KEY
from pagedweight.integrations.vllm.report import Figures

HELP = {
    "mean_bits": "mean width of the linear-blocks",
    "lowest_mean_bits": "lowest mean width since the start",
    "resident_bytes": "device bytes of planes and tables that never leave, on one rank",
    "paged_bytes": "bytes of KV blocks that planes hold, on one rank",
    "kv_bytes": "bytes of KV blocks that requests hold, on one rank",
    "free_bytes": "bytes of free KV blocks, on one rank",
    "lowered": "linear-blocks lowered since the start",
    "raised": "linear-blocks raised since the start",
    "blocks_given": "KV blocks that weights gave up since the start",
    "blocks_taken": "KV blocks that weights took since the start",
    "moved_frames": "frames copied between blocks on the device since the start",
    "rescues": "allocations that weights saved from failing since the start",
    "shortfall_bytes": "what the last plan under pressure could not release",
    "planning_seconds": "time that scheduling steps spent on weights since the start",
}


class PagedWeightMetrics(StatLoggerBase):
    """Gauges pagedweight:<figure> of one engine; silent for models without paged experts."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._board = FiguresBoard(vllm_config.instance_id)
        self._serves = vllm_config.model_config.quantization == KEY
        self._gauges: dict[str, Any] = {}
        self._labels = {"model_name": str(vllm_config.model_config.served_model_name), "engine": str(engine_index)}

    def record(self, *args: Any, **kwargs: Any) -> None:
        found = self._board.read() if self._serves else None
        if found is None:
            return
        if not self._gauges:
            self._gauges = {name: self._gauge(name) for name in Figures._fields}
        for name, value in found._asdict().items():
            self._gauges[name].set(value)

    def log_engine_initialized(self) -> None:
        return None

    def _gauge(self, name: str) -> Any:
        gauge = prometheus_client.Gauge(
            f"pagedweight:{name}", HELP[name], labelnames=list(self._labels), multiprocess_mode="mostrecent"
        )
        return gauge.labels(**self._labels)
