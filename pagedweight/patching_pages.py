"""Expert weights on their way from a model or a checkpoint to host pages in the kernels' device order, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.bitplane import dequantize, table_from_bytes
from pagedweight.discovery import PARAMETERS, ExpertsModule
from pagedweight.kernels.device_order import PlaneGeometry, from_device_order, plane_geometry, to_device_order
from pagedweight.layout import BlockId, Layout, MoeLayer, PackedBlock, Projection, table_bytes
from pagedweight.policy import Policy
from pagedweight.quant.model import quantize_block, sensitivity
from pagedweight.runtime.pages import HostPages, PageSizes

LEVELS = ("fast",)
GROUP_WEIGHTS = 1 << 20  # experts smaller than this are quantized together: each call costs some 50 ms
Importance = Mapping[BlockId, torch.Tensor]


class QuantizedLayer(NamedTuple):
    """One MoE layer's linear-blocks in row order, on the host. sensitivity: (2E, W) fp64, s_i^b of Eq. (2)."""

    blocks: list[tuple[BlockId, PackedBlock]]
    sensitivity: np.ndarray


def layout_of(
    moe_layers: Sequence[MoeLayer], widths: tuple[int, ...], codebooks: Mapping[int, str] | None = None
) -> Layout:
    """The layout of a model's experts, in lut16 where no other codebook is given."""
    unknown = sorted(set(codebooks or {}) - set(widths))
    if unknown:
        raise ValueError(f"codebooks are given for widths {unknown}, which are not among {widths}; leave them out")
    return Layout(tuple(moe_layers), widths, dict.fromkeys(widths, "lut16") | dict(codebooks or {}))


def check_level(level: str) -> None:
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; the levels are {', '.join(LEVELS)}")


def quantize_layer(
    experts: ExpertsModule, layout: Layout, importance: Importance | None = None, seed: int = 0
) -> QuantizedLayer:
    """Quantize a layer on its own device, to the layout's widths and codebooks; importance by linear-block, ones
    where not given. Changes nothing."""
    stacks = [_quantize_projection(experts, projection, layout, importance or {}, seed) for projection in Projection]
    members = [member for pair in zip(*stacks, strict=True) for member in pair]
    return QuantizedLayer([(block, packed) for block, packed, _ in members], np.stack([harm for _, _, harm in members]))


def _quantize_projection(
    experts: ExpertsModule, projection: Projection, layout: Layout, importance: Importance, seed: int
) -> list[tuple[BlockId, PackedBlock, np.ndarray]]:
    weights = getattr(experts.module, PARAMETERS[projection]).detach()
    blocks = [BlockId(experts.shape.layer, expert, projection) for expert in range(len(weights))]
    for block, weight in zip(blocks, weights, strict=True):
        if not weight.isfinite().all():
            raise ValueError(f"{block} holds NaN or infinite weights; repair the model before quantizing it")
    members = []
    for group in _groups(blocks, weights[0].numel()):
        stack = weights[group[0].expert : group[-1].expert + 1]
        stakes = [importance.get(block) for block in group]
        spread = None
        if any(stake is not None for stake in stakes):
            ones = torch.ones((), device=stack.device)
            spread = [(ones if s is None else s.to(stack.device)).expand(stack.shape[1:]) for s in stakes]
        # Rows are quantized one by one, so small experts go through as one tall block.
        tall = quantize_block(
            stack.flatten(0, 1),
            layout.widths,
            importance=None if spread is None else torch.cat(spread),
            seed=seed,
            codebooks=layout.codebooks,
        )
        for block, weight, packed, stake in zip(group, stack, _split(tall, len(group)), stakes, strict=True):
            harm = sensitivity(weight, packed, None if stake is None else stake.to(weight.device))
            members.append((block, _on_host(packed), harm.cpu().numpy()))
    return members


def _groups(blocks: list[BlockId], weights_each: int) -> Iterator[list[BlockId]]:
    size = max(1, GROUP_WEIGHTS // weights_each)
    for first in range(0, len(blocks), size):
        yield blocks[first : first + size]


def _split(tall: PackedBlock, members: int) -> Iterator[PackedBlock]:
    """Linear-blocks of equal height that were quantized as one."""
    planes = tall.planes.chunk(members, dim=1)
    tables = {bits: table.chunk(members) for bits, table in tall.tables.items()}
    for member in range(members):
        yield PackedBlock(
            planes[member].contiguous(), {bits: parts[member] for bits, parts in tables.items()}, tall.columns
        )


def _on_host(packed: PackedBlock) -> PackedBlock:
    return PackedBlock(
        packed.planes.cpu(), {bits: table.cpu() for bits, table in packed.tables.items()}, packed.columns
    )


def weight_only_policy(layout: Layout, sensitivities: np.ndarray) -> Policy:
    """A policy from the quantization error alone, (R, W); every expert of a layer counts as routed to equally."""
    mass = np.array([1 / layer.experts for layer in layout.moe_layers for _ in range(2 * layer.experts)])
    return Policy.from_sensitivity(layout, sensitivities / mass[:, None], mass)


class PageStore:
    """Host pages of a whole model, addressed by table row, and the geometry to convert them."""

    def __init__(self, layout: Layout, frame_bytes: int, pinned_bytes: int | None) -> None:
        self.layout = layout
        self.geometries = [plane_geometry(n, k, frame_bytes) for n, k in layout.row_shapes()]
        self.sizes = page_sizes(layout, self.geometries)
        self.host = HostPages(self.sizes, pinned_bytes)

    def store(self, block: BlockId, packed: PackedBlock) -> None:
        """Keep every plane and table of a linear-block."""
        row = self.layout.row(block)
        for plane, page in enumerate(to_device_order(packed.planes, self.geometries[row])):
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

    def dense(self, layer: MoeLayer, projection: Projection, bits: int) -> torch.Tensor:
        """(E, N, K) fp32 weights of one projection at a width."""
        experts = range(layer.experts)
        return torch.stack([dequantize(self.load(BlockId(layer.layer, e, projection)), bits) for e in experts])

    def _table(self, row: int, bits: int, geometry: PlaneGeometry) -> torch.Tensor:
        codebook = self.layout.codebooks[bits]
        octets = self.host.table(row, bits)[: table_bytes(codebook, geometry.rows, bits)]
        return table_from_bytes(octets.clone(), codebook, bits)


def page_sizes(layout: Layout, geometries: Sequence[PlaneGeometry]) -> PageSizes:
    """Frames of every page and table, given the cut of each row's planes."""
    frames = np.array([geometry.frames for geometry in geometries], dtype=np.int64)
    return PageSizes.of(layout, frames, geometries[0].frame_bytes)
