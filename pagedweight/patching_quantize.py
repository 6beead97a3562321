"""One MoE layer's dense weights to linear-blocks in row order, each with the damage its widths do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pagedweight.layout import BlockId, Layout, MoeLayer, PackedBlock, Projection
from pagedweight.policy import Policy
from pagedweight.quant.levels import Settings, Stakes, quantize_experts
from pagedweight.quant.model import sensitivity

Importance = Mapping[BlockId, Tensor]


class Measured(Protocol):
    """Calibration of a model's own weights, by layer index: `pagedweight.calibration.statistics.Statistics`."""

    def importance(self, layer_index: int) -> tuple[Stakes, Stakes]:
        """What gate_up's and down's errors in one layer are weighed with."""

    def routing_mass(self, layer_index: int) -> Tensor:
        """Eq. (1), (E,)."""


class QuantizedBlock(NamedTuple):
    """A linear-block on the host. s_bar: float64 (W,), its damage at each width per unit of routing mass."""

    block: BlockId
    packed: PackedBlock
    s_bar: np.ndarray


def quantized_blocks(
    shape: MoeLayer,
    weights: tuple[Tensor, Tensor],
    settings: Settings,
    *,
    stakes: tuple[Stakes, Stakes] | None = None,
    importance: Importance | None = None,
) -> Iterator[QuantizedBlock]:
    """A layer's linear-blocks in row order, made on the weights' device a few at a time.

    weights: (E, 2I, H) and (E, H, I). stakes: calibration's of this layer. importance: by linear-block, instead.
    Damage is in nats with stakes, and in weighted squared weights without.
    """
    names = [[BlockId(shape.layer, e, projection) for e in range(shape.experts)] for projection in Projection]
    stakes = None if stakes is None else tuple(own.on(weights[0].device) for own in stakes)
    given = [_stacked(importance or {}, named, weight) for named, weight in zip(names, weights, strict=True)]
    stacks = [
        quantize_experts(
            weights[projection],
            settings,
            None if stakes is None else stakes[projection],
            importance=given[projection],
            names=names[projection],
        )
        for projection in Projection
    ]
    for expert, pair in enumerate(zip(*stacks, strict=True)):
        for projection, packed in zip(Projection, pair, strict=True):
            weight = weights[projection][expert]
            if stakes is None:
                weighed = None if given[projection] is None else given[projection][expert]
                s_bar = (shape.experts * sensitivity(weight, packed, weighed)).cpu().numpy()
            else:
                s_bar = np.array(stakes[projection].s_bar(expert, weight, packed, settings.widths))
            yield QuantizedBlock(names[projection][expert], moved(packed, "cpu"), s_bar)


def _stacked(importance: Importance, names: list[BlockId], weight: Tensor) -> Tensor | None:
    """(E, N, K) importance on the weight's device, ones where a linear-block has none; None where none has."""
    given = [importance.get(name) for name in names]
    if all(stake is None for stake in given):
        return None
    ones = torch.ones((), device=weight.device)
    return torch.stack([(ones if s is None else s.to(weight.device)).expand(weight.shape[1:]) for s in given])


def moved(packed: PackedBlock, device: torch.device | str) -> PackedBlock:
    """The same on another device."""
    tables = {bits: table.to(device) for bits, table in packed.tables.items()}
    return PackedBlock(packed.planes.to(device), tables, packed.columns)


def routing_mass(shape: MoeLayer, layer_index: int, measured: Measured | None) -> np.ndarray:
    """(2E,) by row: calibration's, or every expert alike."""
    if measured is None:
        return np.full(2 * shape.experts, 1 / shape.experts)
    return measured.routing_mass(layer_index).cpu().numpy().repeat(2)


def sensitivity_policy(layout: Layout, s_bar: np.ndarray, measured: Measured | None) -> Policy:
    """The policy that quantizing knows: damage (R, W) by linear-block and width, and each expert's routing mass."""
    mass = [routing_mass(shape, index, measured) for index, shape in enumerate(layout.moe_layers)]
    return Policy.from_sensitivity(layout, s_bar, np.concatenate(mass))
