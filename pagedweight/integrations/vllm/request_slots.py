"""Which request each token of a step belongs to, so that statistics can be merged by the KV blocks requests hold.

The engine gives running requests slots (RequestSlots); ranks write every batch's slots for the kernels (BatchSlots).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pagedweight.experts import TokenSlots
from pagedweight.integrations.vllm.commands import Seating
from pagedweight.integrations.vllm.rank_signals import to_device
from pagedweight.layout import RoutingStats


class RequestSlots:
    """Slots of the running requests; where there are more requests than slots, some share one."""

    def __init__(self, slots: int) -> None:
        self._slot: dict[str, int] = {}
        self._requests = np.zeros(slots, dtype=np.int64)

    def follow(self, running: Iterable[str]) -> Seating:
        """Requests that run now have a slot, others have none; what ranks must know of that."""
        now = set(running)
        left = tuple(request for request in self._slot if request not in now)
        for request in left:
            self._requests[self._slot.pop(request)] -= 1
        cleared, entered = [], []
        for request in sorted(now - self._slot.keys()):
            slot = int(self._requests.argmin())
            if not self._requests[slot]:
                cleared.append(slot)
            self._requests[slot] += 1
            self._slot[request] = slot
            entered.append((request, slot))
        return Seating(left, tuple(entered), tuple(cleared))

    def kv_blocks(self, blocks_of: Callable[[str], int]) -> np.ndarray:
        """float32 (slots,), KV blocks that the requests of each slot hold."""
        held = np.zeros(len(self._requests), dtype=np.float32)
        for request, slot in self._slot.items():
            held[slot] += blocks_of(request)
        return held


class BatchSlots:
    """One rank's side: slots of the coming forward's tokens, and statistics that begin anew with a slot's request."""

    def __init__(self, tokens: TokenSlots, stats: RoutingStats) -> None:
        self._tokens = tokens
        self._stats = stats
        self._slot: dict[str, int] = {}
        self._marked: list[int] | None = None

    def seat(self, seating: Seating) -> None:
        for request in seating.left:
            self._slot.pop(request, None)
        self._slot.update(seating.entered)
        if seating.cleared:
            slots = to_device(np.array(seating.cleared), self._stats.mass.device)
            for table in self._stats:
                table.index_fill_(0, slots, 0)

    def mark(self, requests: Sequence[str], tokens: np.ndarray) -> None:
        """The batch is `tokens[n]` tokens of `requests[n]`, in this order; what follows is padding."""
        slots = np.repeat([self._slot[request] for request in requests], tokens)
        # From one decode step to the next nothing changes, and the device is not asked again.
        if (marked := slots.tolist()) != self._marked:
            self._tokens.set(to_device(slots.astype(np.int32), self._stats.mass.device))
            self._marked = marked
