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
        self._latest: Signals | None = None
        self._coming: tuple[Signals, torch.cuda.Event] | None = None

    def read(self, *, log_features: bool, kv_blocks: np.ndarray | None = None) -> Signals | None:
        """Signals as CPU tensors; None until the first have come.

        kv_blocks: float32 (R_s,), blocks that each slot's requests hold, by which they weigh; None weighs all alike.
        """
        if self._coming is not None and self._coming[1].query():
            self._latest, self._coming = self._coming[0], None
        if self._coming is None:
            weights = None if kv_blocks is None else to_device(kv_blocks, self._stats.mass.device)
            merged = merge_requests(self._stats, weights, log_features=log_features)
            self._age()
            if self._stats.mass.device.type == "cpu":
                self._latest = merged
            else:
                self._coming = Signals(*map(_to_host, merged[:4])), torch.cuda.Event()
                self._coming[1].record()
        return self._latest

    def _age(self) -> None:
        self._stats.mass.mul_(_KEPT)
        self._stats.counts.floor_divide_(2)
        # Sums age, the largest norm stays.
        self._stats.features[..., :2].mul_(_KEPT)


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting."""
    found = torch.from_numpy(values)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
