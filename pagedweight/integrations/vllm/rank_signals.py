"""A rank's routing statistics on their way to the engine, without making anything wait."""

from __future__ import annotations

import numpy as np
import torch

from pagedweight.layout import RoutingStats
from pagedweight.runtime.observe import Signals, merge_requests

# What was counted before a reading weighs half of what is counted after it.
_KEPT = 0.5


class RankSignals:
    """Each reading asks for the statistics of now and returns the newest that have reached the host."""

    def __init__(self, stats: RoutingStats) -> None:
        self._stats = stats
        self._reading: _Reading | None = None
        self._latest: Signals | None = None
        self._coming: tuple[Signals, torch.cuda.Event] | None = None

    def read(self, *, log_features: bool, kv_blocks: np.ndarray | None = None) -> Signals | None:
        """Signals as CPU tensors; None until the first have come.

        kv_blocks: float32 (R_s,), blocks that each slot's requests hold, by which they weigh; None weighs all alike.
        """
        if self._coming is not None and self._coming[1].query():
            self._latest, self._coming = self._coming[0], None
        if self._coming is None:
            if self._stats.mass.device.type == "cpu":
                weights = None if kv_blocks is None else torch.from_numpy(kv_blocks)
                self._latest = _merge_and_age(self._stats, weights, log_features)
            else:
                if self._reading is None:
                    self._reading = _Reading(self._stats, log_features, by_request=kv_blocks is not None)
                self._coming = Signals(*map(_to_host, self._reading.take(kv_blocks)[:4])), torch.cuda.Event()
                self._coming[1].record()
        return self._latest


class _Reading:
    """Merging and aging as one CUDA graph: one by one, its some fifty kernels would take the host milliseconds."""

    def __init__(self, stats: RoutingStats, log_features: bool, *, by_request: bool) -> None:
        device = stats.mass.device
        with torch.inference_mode(False):
            self._kv_blocks = torch.zeros(len(stats.mass), device=device) if by_request else None
        merge_requests(stats, self._kv_blocks, log_features=log_features)  # what is captured must have been loaded
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of an engine may wait for their own copies meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._merged = _merge_and_age(stats, self._kv_blocks, log_features)

    def take(self, kv_blocks: np.ndarray | None) -> Signals:
        """Signals on the device, until the next are taken."""
        if kv_blocks is not None:
            self._kv_blocks.copy_(to_device(kv_blocks, self._kv_blocks.device))
        self._graph.replay()
        return self._merged


def _merge_and_age(stats: RoutingStats, kv_blocks: torch.Tensor | None, log_features: bool) -> Signals:
    merged = merge_requests(stats, kv_blocks, log_features=log_features)
    stats.mass.mul_(_KEPT)
    stats.counts.floor_divide_(2)
    # Sums age, the largest norm stays.
    stats.features[..., :2].mul_(_KEPT)
    return merged


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting."""
    found = torch.from_numpy(values)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
