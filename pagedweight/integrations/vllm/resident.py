"""Device memory that a rank's experts hold for good: the planes up to the resident width, and room for tables."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from pagedweight.kernels.device_order import plane_geometry, to_device_order
from pagedweight.layout import BlockTables, Layout, PackedBlock, table_bytes
from pagedweight.runtime.config import FRAME_ALIGNMENT_BYTES

# User space on 64-bit machines; the lowest page is never mapped.
_LOWEST_ADDRESS, _HIGHEST_ADDRESS = 1 << 16, 1 << 47


class ResidentWeights:
    """Planes 1..resident_width of every linear-block and its table of that width; where widths can rise, a slot for
    its largest table too.

    tables: what kernels read, at fixed addresses; starts with every row at the resident width.
    upper_widths: supported widths above the resident one, none when widths are fixed.
    slot_address: int64 (R,), where a row's table goes while its width is above the resident one.
    bytes: device bytes held.
    """

    def __init__(
        self, layout: Layout, resident_width: int, frame_bytes: int, device: torch.device, *, fixed: bool = False
    ) -> None:
        self.layout = layout
        self.upper_widths = () if fixed else tuple(width for width in layout.widths if width > resident_width)
        self.resident_width = resident_width
        self.frame_bytes = frame_bytes
        self.geometries = [plane_geometry(n, k, frame_bytes) for n, k in layout.row_shapes()]
        self.plane_frames = np.array([geometry.frames for geometry in self.geometries], dtype=np.int64)
        planes_bytes = int(self.plane_frames.sum()) * resident_width * frame_bytes
        resting, widest = row_table_bytes(layout, (resident_width,)), row_table_bytes(layout, self.upper_widths)
        self._memory = _aligned_bytes(planes_bytes + int(resting.sum() + widest.sum()), device)
        base = self._memory.data_ptr()
        first = np.cumsum(self.plane_frames) - self.plane_frames
        self._first_plane = first * resident_width * frame_bytes
        self._resting_table = planes_bytes + np.cumsum(resting) - resting
        self.resting_address = base + self._resting_table
        self.slot_address = base + planes_bytes + int(resting.sum()) + np.cumsum(widest) - widest
        self.tables = self._start(base, device)
        self._converted: dict[tuple[int, int], tuple[PackedBlock, torch.Tensor]] = {}

    @property
    def bytes(self) -> int:
        return self._memory.numel()

    def put(self, row: int, packed: PackedBlock) -> torch.Tensor:
        """Place a linear-block's resident planes and table; returns all its pages (P, bytes) in device order."""
        pages = self._device_order(row, packed)
        resident = pages[: self.resident_width].reshape(-1)
        self._write(int(self._first_plane[row]), resident)
        table = packed.tables[self.resident_width].contiguous().view(-1).view(torch.uint8)
        self._write(int(self._resting_table[row]), table)
        return pages

    def write_slot(self, row: int, table: torch.Tensor) -> int:
        """Put a table, uint8 and page-locked, into the row's slot on the compute stream; returns its address."""
        at = int(self.slot_address[row]) - self._memory.data_ptr()
        self._memory[at : at + table.numel()].copy_(table, non_blocking=True)
        return int(self.slot_address[row])

    def _write(self, at: int, data: torch.Tensor) -> None:
        self._memory[at : at + data.numel()].copy_(data)

    def _device_order(self, row: int, packed: PackedBlock) -> torch.Tensor:
        """Pages in device order; drawn linear-blocks are one object, converted once."""
        geometry = self.geometries[row]
        kept = self._converted.get((geometry.rows, geometry.columns))
        if kept is None or kept[0] is not packed:
            kept = packed, to_device_order(packed.planes, geometry)
            self._converted[geometry.rows, geometry.columns] = kept
        return kept[1]

    def _start(self, base: int, device: torch.device) -> BlockTables:
        rows, parent = self.layout.rows, self.layout.parent_width
        address = np.zeros((rows, parent, int(self.plane_frames.max())), dtype=np.int64)
        for row, frames in enumerate(self.plane_frames.tolist()):
            count = self.resident_width * frames
            placed = base + self._first_plane[row] + np.arange(count) * self.frame_bytes
            address[row, : self.resident_width, :frames] = placed.reshape(self.resident_width, frames)
        with torch.inference_mode(False):
            return BlockTables(
                torch.full((rows,), self.resident_width, dtype=torch.int32, device=device),
                torch.from_numpy(address).to(device),
                torch.from_numpy(self.resting_address.copy()).to(device),
                self._memory if device.type == "cuda" else whole_memory(),
            )


def row_table_bytes(layout: Layout, widths: tuple[int, ...]) -> np.ndarray:
    """int64 (R,), bytes of each row's largest table of some widths, aligned; 0 without widths."""
    heights = np.array([height for height, _ in layout.row_shapes()])
    of_height = {
        height: max((table_bytes(layout.codebooks[b], height, b) for b in widths), default=0)
        for height in set(heights.tolist())
    }
    held = np.array([of_height[height] for height in heights.tolist()], dtype=np.int64)
    return -(-held // FRAME_ALIGNMENT_BYTES) * FRAME_ALIGNMENT_BYTES


def _aligned_bytes(count: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        raw = torch.empty(count + FRAME_ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    shift = -raw.data_ptr() % FRAME_ALIGNMENT_BYTES
    return raw[shift : shift + count]


def whole_memory() -> torch.Tensor:
    """uint8, every address of this process: the torch twin finds frames by their offset in one tensor, and KV blocks
    are not in the same allocation as resident weights. Only addresses that tables name are ever read."""
    size = _HIGHEST_ADDRESS - _LOWEST_ADDRESS
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(_LOWEST_ADDRESS), dtype=torch.uint8)
