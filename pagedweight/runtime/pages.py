"""Host copies of pages and tables, page-locked as far as a budget allows.

Pages never change, so a page whose host copy exists is dropped from the device without a copy; one without is written
back first. The bytes are opaque here: whoever stores them has put them in the kernels' device order.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.layout import Layout

# Large chunks: page-locking costs per call, and torch's own pinned allocator rounds each request to a power of two.
_CHUNK_BYTES = 256 * 2**20
_OS_PAGE_BYTES = 4096


class PageSizes(NamedTuple):
    """Frames that pages and tables take.

    widths: supported widths, ascending. plane_frames: int64 (R,), frames of one plane. table_frames: int64 (R, W),
    frames of the table of widths[w].
    """

    widths: tuple[int, ...]
    frame_bytes: int
    plane_frames: np.ndarray
    table_frames: np.ndarray

    @classmethod
    def of(cls, layout: Layout, plane_frames: np.ndarray, frame_bytes: int) -> PageSizes:
        """Sizes for a layout's lut16 tables ((N, 2^b) fp16), given the frames of a plane of each row."""
        if len(plane_frames) != layout.rows:
            raise ValueError(f"plane_frames has {len(plane_frames)} entries; the layout has {layout.rows} rows")
        rows = np.array([n for n, _ in layout.row_shapes()], dtype=np.int64)
        table_bytes = rows[:, None] * 2 * 2 ** np.array(layout.widths, dtype=np.int64)
        return cls(layout.widths, frame_bytes, np.asarray(plane_frames, np.int64), -(-table_bytes // frame_bytes))

    @property
    def planes(self) -> int:
        """P, the parent width."""
        return self.widths[-1]

    def resident_bytes(self) -> np.ndarray:
        """int64 (R, W), M_i^b: planes 1..b, the table of b, and the floor's table (once when b is the floor)."""
        frames = self.plane_frames[:, None] * np.array(self.widths) + self.table_frames
        frames[:, 1:] += self.table_frames[:, :1]
        return frames * self.frame_bytes


class HostPages:
    """Host memory for every page and table that the device may need again.

    pinned_bytes: page-locked bytes allowed, for a CUDA device; None for all. Tables come first, since a lowered width
    waits for its table. 0 on a machine without CUDA.
    """

    def __init__(self, sizes: PageSizes, pinned_bytes: int | None = 0) -> None:
        self.sizes = sizes
        fb = sizes.frame_bytes
        table_bytes = int(sizes.table_frames.sum()) * fb
        plane_bytes = int(sizes.plane_frames.sum()) * sizes.planes * fb
        allowed = table_bytes + plane_bytes if pinned_bytes is None else pinned_bytes
        self._table_memory = _HostMemory(table_bytes, min(allowed, table_bytes))
        self._plane_memory = _HostMemory(plane_bytes, max(0, allowed - table_bytes))
        self._pages: dict[tuple[int, int], torch.Tensor] = {}
        self._reserved: dict[tuple[int, int], torch.Tensor] = {}
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def pinned_bytes(self) -> int:
        return self._table_memory.pinned_bytes + self._plane_memory.pinned_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the copies held."""
        return sum(copy.numel() for copies in (self._pages, self._tables) for copy in copies.values())

    def page(self, row: int, plane: int) -> torch.Tensor | None:
        """uint8 (plane_frames * frame_bytes,), or None when the only copy is on the device."""
        return self._pages.get((row, plane))

    def table(self, row: int, width: int) -> torch.Tensor:
        """uint8 (table_frames * frame_bytes,), the table of a width, padded to whole frames."""
        return self._tables[row, width]

    def reserve(self, row: int, plane: int) -> torch.Tensor:
        """Room for a page's copy, the same until `store` is called with it, which makes it one. Raises when memory
        is short.
        """
        if (row, plane) not in self._reserved:
            size = int(self.sizes.plane_frames[row]) * self.sizes.frame_bytes
            self._reserved[row, plane] = self._plane_memory.take(size)
        return self._reserved[row, plane]

    def store(self, row: int, plane: int, data: torch.Tensor) -> None:
        """Keep a page's bytes: data is copied, unless it is the room that `reserve` gave."""
        expected = int(self.sizes.plane_frames[row]) * self.sizes.frame_bytes
        if data.dtype != torch.uint8 or data.numel() != expected:
            raise ValueError(
                f"plane {plane} of row {row} is {data.numel()} elements of {data.dtype}; give {expected} of torch.uint8"
            )
        if (row, plane) in self._pages:
            raise ValueError(f"plane {plane} of row {row} has a host copy already; pages never change")
        room = self.reserve(row, plane)
        if data is not room:
            room.copy_(data.reshape(-1))
        self._pages[row, plane] = self._reserved.pop((row, plane))

    def store_table(self, row: int, width: int, data: torch.Tensor) -> None:
        """Keep a table's bytes (any dtype, row major), padded with zeros to whole frames."""
        data = data.contiguous().view(-1).view(torch.uint8)
        room = int(self.sizes.table_frames[row, self.sizes.widths.index(width)]) * self.sizes.frame_bytes
        if data.numel() > room:
            raise ValueError(f"the {width}-bit table of row {row} is {data.numel()} bytes; its frames hold {room}")
        kept = self._table_memory.take(room)
        kept[: data.numel()] = data
        kept[data.numel() :] = 0
        self._tables[row, width] = kept

    def forget(self, row: int, plane: int) -> None:
        """Let a page's copy go; the page is then written back, to the same room, before its frames are given up."""
        self._reserved[row, plane] = self._pages.pop((row, plane))

    def close(self) -> None:
        """Unlock the memory. No transfer may be in flight."""
        self._pages.clear()
        self._reserved.clear()
        self._tables.clear()
        self._table_memory.close()
        self._plane_memory.close()


class _HostMemory:
    """Bytes handed out from large chunks, page-locked while the budget lasts. Nothing is given back before close."""

    def __init__(self, expected_bytes: int, pinned_budget_bytes: int) -> None:
        self._expected_bytes = expected_bytes
        self._pinned_budget_bytes = pinned_budget_bytes
        self._chunks: list[tuple[torch.Tensor, bool]] = []
        self._used = 0
        self.pinned_bytes = 0

    def take(self, count: int) -> torch.Tensor:
        if not self._chunks or self._used + count > self._chunks[-1][0].numel():
            self._add_chunk(count)
        start, self._used = self._used, self._used + count
        return self._chunks[-1][0][start : start + count]

    def close(self) -> None:
        for chunk, pinned in self._chunks:
            if pinned:
                torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())
        self._chunks.clear()
        self.pinned_bytes = 0

    def _add_chunk(self, count: int) -> None:
        left = self._pinned_budget_bytes - self.pinned_bytes
        wanted = self._pinned_budget_bytes > 0
        size = max(count, min(_CHUNK_BYTES, self._expected_bytes, left if left > 0 else _CHUNK_BYTES))
        self._expected_bytes = max(0, self._expected_bytes - size)
        chunk = _page_aligned(size)
        pinned = size <= left and _page_lock(chunk)
        if wanted and not pinned:
            warnings.warn(
                f"page-locked host memory is used up at {self.pinned_bytes} bytes; further pages are kept in pageable "
                "memory and reload more slowly (raise host_pinned_bytes or the system's limit)",
                RuntimeWarning,
                stacklevel=4,
            )
            self._pinned_budget_bytes = 0
        self.pinned_bytes += size if pinned else 0
        self._chunks.append((chunk, pinned))
        self._used = 0


def _page_aligned(size: int) -> torch.Tensor:
    """uint8 (size,) on its own operating-system pages, since locking works on whole ones."""
    with torch.inference_mode(False):
        raw = torch.empty(size + 2 * _OS_PAGE_BYTES, dtype=torch.uint8)
        shift = -raw.data_ptr() % _OS_PAGE_BYTES
        return raw[shift : shift + size]


def _page_lock(chunk: torch.Tensor) -> bool:
    """Lock a chunk for direct device copies; False when the system refuses."""
    return int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), chunk.numel(), 0)) == 0
