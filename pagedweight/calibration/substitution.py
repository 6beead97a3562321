"""A float model whose experts hold the values that some plan of widths would give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pagedweight.bitplane import dequantize
from pagedweight.discovery import ExpertsModule
from pagedweight.layout import BlockId, Layout, PackedBlock


class Substitution:
    """Writes dequantized linear-blocks into a model's experts. Make one with `substituted`, which undoes it."""

    def __init__(self, found: Sequence[ExpertsModule], layout: Layout, block: Callable[[BlockId], PackedBlock]) -> None:
        self._blocks = list(layout.blocks())
        self._block = block
        self._weights = {experts.shape.layer: weights_of(experts) for experts in found}
        # On the host: the device need not hold the model twice.
        self._own = {layer: [w.to("cpu", copy=True) for w in weights] for layer, weights in self._weights.items()}
        self._bits = np.zeros(layout.rows, dtype=np.int64)

    @torch.no_grad()
    def write(self, bits: np.ndarray) -> None:
        """Give every row the values of its width, (R,), 0 for its own; rows that have them already are left alone."""
        for row in np.flatnonzero(self._bits != bits):
            block, width = self._blocks[row], int(bits[row])
            own = self._own[block.layer][block.projection][block.expert]
            target = self._weights[block.layer][block.projection][block.expert]
            target.copy_(dequantize(self._block(block), width) if width else own)
            self._bits[row] = width


def weights_of(experts: ExpertsModule) -> tuple[Tensor, Tensor]:
    """(E, 2I, H) and (E, H, I), the module's own storage."""
    return experts.module.gate_up_proj.detach(), experts.module.down_proj.detach()


@contextmanager
def substituted(
    found: Sequence[ExpertsModule], layout: Layout, block: Callable[[BlockId], PackedBlock]
) -> Iterator[Substitution]:
    """The substitution of a model's experts; their own weights come back exactly, whatever happens."""
    substitution = Substitution(found, layout, block)
    try:
        yield substitution
    finally:
        substitution.write(np.zeros(layout.rows, dtype=np.int64))
