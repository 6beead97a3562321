"""Host copies of pages and tables: page-locked as far as a budget allows, then read from a source, else pageable.

Pages never change, so a page that the host has is dropped from the device without a copy; one that it has not is
written back first. The bytes are opaque here: whoever gives them has put them in the kernels' device order.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pagedweight.layout import Layout, table_bytes
from pagedweight.runtime.host_memory import HostMemory

_UNLIMITED_BYTES = 2**62


class PageSizes(NamedTuple):
    """Frames that pages and tables take.

    widths: supported widths, ascending. plane_frames: int64 (R,), frames of one plane. table_frames: int64 (R, W),
    frames of the slot for the table of widths[w]; above the floor never fewer than a narrower width's, so that
    lowering always finds room in the slot.
    """

    widths: tuple[int, ...]
    frame_bytes: int
    plane_frames: np.ndarray
    table_frames: np.ndarray

    @classmethod
    def of(cls, layout: Layout, plane_frames: np.ndarray, frame_bytes: int) -> PageSizes:
        """Sizes for a layout, given the frames of a plane of each row."""
        if len(plane_frames) != layout.rows:
            raise ValueError(f"plane_frames has {len(plane_frames)} entries; the layout has {layout.rows} rows")
        rows = np.array([n for n, _ in layout.row_shapes()], dtype=np.int64)
        row_bytes = np.array([table_bytes(layout.codebooks[b], 1, b) for b in layout.widths], dtype=np.int64)
        # A cubic of 5 bits is smaller than a byte table of 4.
        row_bytes[1:] = np.maximum.accumulate(row_bytes[1:])
        table_frames = -(-rows[:, None] * row_bytes // frame_bytes)
        return cls(layout.widths, frame_bytes, np.asarray(plane_frames, np.int64), table_frames)

    @property
    def planes(self) -> int:
        """P, the parent width."""
        return self.widths[-1]

    def resident_bytes(self) -> np.ndarray:
        """int64 (R, W), M_i^b: planes 1..b, the table of b, and the floor's table (once when b is the floor)."""
        frames = self.plane_frames[:, None] * np.array(self.widths) + self.table_frames
        frames[:, 1:] += self.table_frames[:, :1]
        return frames * self.frame_bytes


class PageSource(Protocol):
    """Where any page can be read at any time, such as a checkpoint's files."""

    def page(self, row: int, plane: int) -> torch.Tensor:
        """uint8 (plane_frames * frame_bytes,), in memory of its own."""
        ...


class HostPages:
    """Every page and table that the device may need again.

    pinned_bytes: page-locked bytes allowed, for a CUDA device; None for all. Tables come first, since a lowered width
    waits for its table. 0 on a machine without CUDA.
    source: what need not be kept in memory is read from there: pages beyond pinned_bytes, and those of the floor, which
    never leave the device. Without one, pages beyond pinned_bytes are kept in pageable memory.
    """

    def __init__(self, sizes: PageSizes, pinned_bytes: int | None = 0, source: PageSource | None = None) -> None:
        self.sizes = sizes
        self._source = source
        self._pinned_budget_bytes = _UNLIMITED_BYTES if pinned_bytes is None else pinned_bytes
        self._table_bytes = int(sizes.table_frames.sum()) * sizes.frame_bytes
        self._table_memory = HostMemory(self._table_bytes)
        kept_planes = sizes.planes if source is None else sizes.planes - sizes.widths[0]
        self._plane_memory = HostMemory(int(sizes.plane_frames.sum()) * kept_planes * sizes.frame_bytes)
        self._pages: dict[tuple[int, int], torch.Tensor] = {}
        self._reserved: dict[tuple[int, int], torch.Tensor] = {}
        self._tables: dict[tuple[int, int], torch.Tensor] = {}
        self._warned = self._pinned_budget_bytes == 0

    @property
    def pinned_bytes(self) -> int:
        return self._table_memory.pinned_bytes + self._plane_memory.pinned_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the copies held."""
        return sum(copy.numel() for copies in (self._pages, self._tables) for copy in copies.values())

    def has(self, row: int, plane: int) -> bool:
        """Whether the page can be had without the device."""
        return self._source is not None or (row, plane) in self._pages

    def keeps(self, plane: int) -> bool:
        """Whether a page of this plane would be kept in memory if it were stored now."""
        return self._source is None or (plane >= self.sizes.widths[0] and not self._plane_memory.locked_out)

    def page(self, row: int, plane: int) -> torch.Tensor | None:
        """uint8 (plane_frames * frame_bytes,), or None when the only copy is on the device."""
        kept = self._pages.get((row, plane))
        return kept if kept is not None or self._source is None else self._source.page(row, plane)

    def table(self, row: int, width: int) -> torch.Tensor:
        """uint8 (table_frames * frame_bytes,), the table of a width, padded to whole frames."""
        return self._tables[row, width]

    def reserve(self, row: int, plane: int) -> torch.Tensor:
        """Room for a page's copy, the same until `store` is called with it, which makes it one. Raises when memory
        is short.
        """
        if (row, plane) not in self._reserved:
            self._reserved[row, plane] = self._room(row, pageable=True)
        return self._reserved[row, plane]

    def store(self, row: int, plane: int, data: torch.Tensor) -> None:
        """Keep a page's bytes: data is copied, unless it is the room that `reserve` gave. With a source, only while
        page-locked memory lasts.
        """
        expected = int(self.sizes.plane_frames[row]) * self.sizes.frame_bytes
        if data.dtype != torch.uint8 or data.numel() != expected:
            raise ValueError(
                f"plane {plane} of row {row} is {data.numel()} elements of {data.dtype}; give {expected} of torch.uint8"
            )
        if (row, plane) in self._pages:
            raise ValueError(f"plane {plane} of row {row} has a host copy already; pages never change")
        room = self._reserved.pop((row, plane), None)
        if room is None:
            room = self._room(row, pageable=self._source is None)
        if room is None:
            return
        if data is not room:
            room.copy_(data.reshape(-1))
        self._pages[row, plane] = room

    def store_table(self, row: int, width: int, data: torch.Tensor) -> None:
        """Keep a table's bytes (any dtype, row major), padded with zeros to whole frames."""
        data = data.contiguous().view(-1).view(torch.uint8)
        room = int(self.sizes.table_frames[row, self.sizes.widths.index(width)]) * self.sizes.frame_bytes
        if data.numel() > room:
            raise ValueError(f"the {width}-bit table of row {row} is {data.numel()} bytes; its frames hold {room}")
        kept = self._take(self._table_memory, room, self._plane_memory.pinned_bytes, pageable=True)
        kept[: data.numel()] = data
        kept[data.numel() :] = 0
        self._tables[row, width] = kept

    def close(self) -> None:
        """Give the memory back. No transfer may be in flight."""
        self._source = None
        self._pages.clear()
        self._reserved.clear()
        self._tables.clear()
        self._table_memory = HostMemory(0)
        self._plane_memory = HostMemory(0)

    def _room(self, row: int, *, pageable: bool) -> torch.Tensor | None:
        """Memory for a page of the row; None when it would be pageable and that is not wanted."""
        size = int(self.sizes.plane_frames[row]) * self.sizes.frame_bytes
        kept_for_tables = max(self._table_bytes, self._table_memory.pinned_bytes)
        return self._take(self._plane_memory, size, kept_for_tables, pageable=pageable)

    def _take(
        self, memory: HostMemory, count: int, held_elsewhere_bytes: int, *, pageable: bool
    ) -> torch.Tensor | None:
        """Room in one of the memories, with one warning once page-locked memory is used up."""
        room = memory.take(count, self._pinned_budget_bytes - held_elsewhere_bytes, pageable=pageable)
        if memory.locked_out and not self._warned:
            self._warned = True
            rest = "kept in pageable memory" if self._source is None else "read from the checkpoint's files"
            warnings.warn(
                f"page-locked host memory is used up at {self.pinned_bytes} bytes; further pages are {rest} and "
                "reload more slowly (raise host_pinned_bytes or the system's limit)",
                RuntimeWarning,
                stacklevel=4,
            )
        return room
