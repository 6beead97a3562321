"""Routing statistics on their way to the host: merged on the device, copied without waiting, used once landed."""

from __future__ import annotations

import numpy as np
import torch

from pagedweight.layout import RoutingStats
from pagedweight.runtime.observe import Signals, merge_requests
from pagedweight.runtime.transfer import Ticket, TransferEngine


class SignalReader:
    """The newest statistics that have reached the host. On the CPU that is now; on CUDA some boundaries ago.

    request_kv: (R_s,) what each request slot holds of the KV cache, in any unit; None weighs slots with tokens alike.
    """

    def __init__(self, stats: RoutingStats | None, engine: TransferEngine, *, log_features: bool) -> None:
        self._stats = stats
        self._engine = engine
        self._log_features = log_features
        self._latest: Signals | None = None
        self._coming: tuple[Signals, Ticket] | None = None
        self.request_kv: np.ndarray | None = None

    def refresh(self, *, wait: bool = False) -> Signals | None:
        """Ask for the current statistics unless a request is under way; returns the newest landed, None at first."""
        self._take_landed(wait)
        if self._coming is None and self._stats is not None:
            merged = merge_requests(self._stats, self._request_kv(), log_features=self._log_features)
            self._coming = Signals(*map(_to_host, merged)), self._engine.fence()
            self._take_landed(wait)
        return self._latest

    def _request_kv(self) -> torch.Tensor | None:
        if self.request_kv is None:
            return None
        held = torch.from_numpy(self.request_kv)
        device = self._stats.mass.device
        return held if device.type == "cpu" else held.pin_memory().to(device, non_blocking=True)

    def _take_landed(self, wait: bool) -> None:
        if self._coming is None:
            return
        signals, ticket = self._coming
        if wait:
            ticket.wait()
        if ticket.done():
            self._latest, self._coming = signals, None


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """A host copy that is complete once a later fence is done."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
