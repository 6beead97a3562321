"""Host memory that is cut from large chunks, page-locked as far as a budget and the system allow."""

from __future__ import annotations

import torch

from pagedweight.runtime.forks import LeftInForks

# Page-locking costs per call, and the allocator of page-locked memory rounds each request up to a power of two: so
# chunks are large powers of two, and a page takes what it needs of one.
_CHUNK_BYTES = 256 * 2**20
_SMALLEST_CHUNK_BYTES = 2**16


class HostMemory(LeftInForks):
    """Bytes handed out from large chunks, page-locked while the budget lasts. Nothing is given back.

    locked_out: whether no more can be page-locked.
    """

    def __init__(self, expected_bytes: int) -> None:
        super().__init__()
        self.pinned_bytes = 0
        self.locked_out = False
        self._locked: list[torch.Tensor] = []
        self._expected_bytes = expected_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, count: int, pinned_budget_bytes: int, *, pageable: bool) -> torch.Tensor | None:
        """uint8 (count,); pinned_budget_bytes: what this memory may lock in all. None when only pageable memory is
        left and that is not wanted.
        """
        if self._used + count > len(self._chunk):
            chunk = self._new_chunk(count, pinned_budget_bytes - self.pinned_bytes, pageable)
            if chunk is None:
                return None
            self._chunk = chunk
            self._expected_bytes = max(0, self._expected_bytes - len(self._chunk))
            self._used = 0
        start, self._used = self._used, self._used + count
        return self._chunk[start : start + count]

    def _new_chunk(self, count: int, lockable_bytes: int, pageable: bool) -> torch.Tensor | None:
        wanted = max(min(_CHUNK_BYTES, self._expected_bytes), _SMALLEST_CHUNK_BYTES)
        size = max(_power_of_two_below(min(wanted, max(1, lockable_bytes))), _power_of_two_above(count))
        with torch.inference_mode(False):
            if not self.locked_out and size <= lockable_bytes:
                try:
                    chunk = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                except RuntimeError:  # the system's own limit
                    pass
                else:
                    self.pinned_bytes += size
                    self._locked.append(chunk)
                    return chunk
            self.locked_out = True
            return torch.empty(max(count, wanted), dtype=torch.uint8) if pageable else None


def _power_of_two_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _power_of_two_above(count: int) -> int:
    return 1 << (count - 1).bit_length()
