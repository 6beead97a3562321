"""Routing statistics on their way to the host: copied without waiting, used once landed, merged by whoever plans."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from pagedweight.layout import RoutingStats
from pagedweight.runtime.forks import LeftInForks
from pagedweight.runtime.observe import Signals, merge_requests
from pagedweight.runtime.transfer import Ticket, TransferEngine


class Reading(LeftInForks):
    """The statistics at one moment, in host memory, and how requests weigh there.

    Merging takes some dozens of small operations: left to the planner's thread, they cost forwards nothing.
    """

    def __init__(
        self,
        stats: RoutingStats,
        request_kv: np.ndarray | None,
        confidence: np.ndarray | None,
        rho_bounds: np.ndarray | None,
        *,
        log_features: bool,
    ) -> None:
        super().__init__()
        self._stats = stats
        self._by_request = request_kv, confidence, rho_bounds
        self._log_features = log_features

    @cached_property
    def merged(self) -> Signals:
        """Over requests."""
        by_request = (None if values is None else torch.from_numpy(values) for values in self._by_request)
        return merge_requests(self._stats, *by_request, log_features=self._log_features)


class SignalReader:
    """The newest statistics that have reached the host. On the CPU that is now; on CUDA some boundaries ago.

    request_kv: (R_s,) what each request slot holds of the KV cache, in any unit; None weighs slots with tokens alike.
    rho_bounds: the policy's clipping bounds, for requests without their own.
    """

    def __init__(
        self,
        stats: RoutingStats | None,
        engine: TransferEngine,
        *,
        log_features: bool,
        rho_bounds: tuple[float, float] = (-1.0, 1.0),
    ) -> None:
        self._stats = stats
        self._engine = engine
        self._log_features = log_features
        self._policy_bounds = rho_bounds
        self._latest: Reading | None = None
        self._coming: tuple[Reading, Ticket] | None = None
        self._confidence: dict[int, float] = {}
        self._rho_bounds: dict[int, tuple[float, float]] = {}
        self.request_kv: np.ndarray | None = None

    def set_request(self, slot: int, confidence: float, rho_bounds: tuple[float, float] | None) -> None:
        """What is known of the request in a slot from now on. ValueError for no slot, share or order."""
        slots = 0 if self._stats is None else len(self._stats.mass)
        if not 0 <= slot < slots:
            raise ValueError(f"request slot {slot} does not exist; statistics have {slots}: raise max_requests")
        if not 0 <= confidence <= 1:
            raise ValueError(f"confidence is {confidence}; it is a share, from 0 to 1")
        if rho_bounds is not None and not rho_bounds[0] <= rho_bounds[1]:
            raise ValueError(f"rho_bounds are {rho_bounds}; give the lower bound first")
        self._confidence[slot] = confidence
        self._rho_bounds.pop(slot, None)
        if rho_bounds is not None:
            self._rho_bounds[slot] = rho_bounds

    def forget_requests(self, slots: int) -> None:
        """New requests come into the first slots: what was known of those there before is gone."""
        for slot in range(slots):
            self._confidence.pop(slot, None)
            self._rho_bounds.pop(slot, None)

    @property
    def landed(self) -> Reading | None:
        """The newest that were seen to have landed; asks the device nothing."""
        return self._latest

    def latest(self, *, wait: bool = False) -> Reading | None:
        """The newest that have landed; the first time they are asked for now, so that there are some at all."""
        self._take_landed(wait)
        return self.refresh(wait=wait) if self._latest is None else self._latest

    def refresh(self, *, wait: bool = False) -> Reading | None:
        """Ask for the current statistics unless a request is under way; returns the newest landed, None at first."""
        self._take_landed(wait)
        if self._coming is None and self._stats is not None:
            held = None if self.request_kv is None else np.array(self.request_kv, dtype=np.float32)
            known = held, self._confidences(), self._bounds()
            reading = Reading(RoutingStats(*map(_to_host, self._stats)), *known, log_features=self._log_features)
            self._coming = reading, self._engine.fence()
            self._take_landed(wait)
        return self._latest

    def _confidences(self) -> np.ndarray | None:
        if not self._confidence:
            return None
        slots = range(len(self._stats.mass))
        return np.array([self._confidence.get(slot, 1.0) for slot in slots], dtype=np.float32)

    def _bounds(self) -> np.ndarray | None:
        if not self._rho_bounds:
            return None
        of_slots = [self._rho_bounds.get(slot, self._policy_bounds) for slot in range(len(self._stats.mass))]
        return np.array(of_slots, dtype=np.float32)

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
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
