"""Expert weights on their way from a model or a checkpoint to host pages in the kernels' device order, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.bitplane import dequantize, table_from_bytes
from pagedweight.checkpoint import Checkpoint
from pagedweight.discovery_experts import ExpertsModule
from pagedweight.kernels.device_order import PlaneGeometry, from_device_order, plane_geometry, to_device_order
from pagedweight.layout import BlockId, Layout, MoeLayer, PackedBlock, Projection, table_bytes
from pagedweight.patching_quantize import Importance, quantized_blocks
from pagedweight.quant.levels import Settings, Stakes
from pagedweight.runtime.pages import HostPages, PageSizes


class QuantizedLayer(NamedTuple):
    """One MoE layer's linear-blocks in row order, on the host. s_bar: (2E, W) fp64, damage per routing mass."""

    blocks: list[tuple[BlockId, PackedBlock]]
    s_bar: np.ndarray


def layout_of(
    moe_layers: Sequence[MoeLayer], widths: tuple[int, ...], codebooks: Mapping[int, str] | None = None
) -> Layout:
    """The layout of a model's experts, in lut16 where no other codebook is given."""
    unknown = sorted(set(codebooks or {}) - set(widths))
    if unknown:
        raise ValueError(f"codebooks are given for widths {unknown}, which are not among {widths}; leave them out")
    return Layout(tuple(moe_layers), widths, dict.fromkeys(widths, "lut16") | dict(codebooks or {}))


def quantize_layer(
    experts: ExpertsModule,
    layout: Layout,
    importance: Importance | None = None,
    seed: int = 0,
    *,
    level: str = "fast",
    stakes: tuple[Stakes, Stakes] | None = None,
) -> QuantizedLayer:
    """Quantize a layer on its own device, to the layout's widths and codebooks. Changes nothing.

    importance, stakes: see `quantized_blocks`.
    """
    settings = Settings(level, layout.widths, layout.codebooks, seed)
    made = list(quantized_blocks(experts.shape, experts.weights(), settings, stakes=stakes, importance=importance))
    return QuantizedLayer([(one.block, one.packed) for one in made], np.stack([one.s_bar for one in made]))


class CheckpointPages:
    """Pages read from a checkpoint's files and put in the device order each time they are asked for.

    Some 170 MB/s a core: for what a budget of host memory leaves out, and for what is wanted only once.
    """

    def __init__(self, opened: Checkpoint, layout: Layout, geometries: Sequence[PlaneGeometry]) -> None:
        self._opened = opened
        self._geometries = geometries
        self._blocks = list(layout.blocks())

    def page(self, row: int, plane: int) -> torch.Tensor:
        return to_device_order(self._opened.plane(self._blocks[row], plane), self._geometries[row])


class PageStore:
    """Host pages of a whole model, addressed by table row, and the geometry to convert them.

    mapped: a checkpoint whose files stand in for memory, as HostPages says; None keeps everything in memory.
    """

    def __init__(
        self, layout: Layout, frame_bytes: int, pinned_bytes: int | None, mapped: Checkpoint | None = None
    ) -> None:
        self.layout = layout
        self.geometries = [plane_geometry(n, k, frame_bytes) for n, k in layout.row_shapes()]
        self.sizes = page_sizes(layout, self.geometries)
        source = None if mapped is None else CheckpointPages(mapped, layout, self.geometries)
        self.host = HostPages(self.sizes, pinned_bytes, source)

    def store(self, block: BlockId, packed: PackedBlock) -> None:
        """Keep every table of a linear-block, and every plane that is not to be read from the checkpoint again."""
        row = self.layout.row(block)
        kept = [plane for plane in range(self.layout.parent_width) if self.host.keeps(plane)]
        for plane, page in zip(kept, to_device_order(packed.planes[kept], self.geometries[row]), strict=True):
            self.host.store(row, plane, page)
        for bits in self.layout.widths:
            self.host.store_table(row, bits, packed.tables[bits])

    def load(self, block: BlockId) -> PackedBlock:
        """The linear-block as it was stored."""
        row = self.layout.row(block)
        geometry = self.geometries[row]
        pages = torch.stack([self.host.page(row, plane) for plane in range(self.layout.parent_width)])
        tables = {bits: self._table(row, bits, geometry) for bits in self.layout.widths}
        return PackedBlock(from_device_order(pages, geometry), tables, geometry.columns)

    def blocks(self) -> Iterator[tuple[BlockId, PackedBlock]]:
        """Every linear-block in row order."""
        for block in self.layout.blocks():
            yield block, self.load(block)

    def dense(
        self, layer: MoeLayer, projection: Projection, bits: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """(E, N, K) weights of one projection at a width."""
        blocks = (self.load(BlockId(layer.layer, expert, projection)) for expert in range(layer.experts))
        return torch.stack([dequantize(block, bits).to(dtype) for block in blocks])

    def _table(self, row: int, bits: int, geometry: PlaneGeometry) -> torch.Tensor:
        codebook = self.layout.codebooks[bits]
        octets = self.host.table(row, bits)[: table_bytes(codebook, geometry.rows, bits)]
        return table_from_bytes(octets.clone(), codebook, bits)


def page_sizes(layout: Layout, geometries: Sequence[PlaneGeometry]) -> PageSizes:
    """Frames of every page and table, given the cut of each row's planes."""
    frames = np.array([geometry.frames for geometry in geometries], dtype=np.int64)
    return PageSizes.of(layout, frames, geometries[0].frame_bytes)
