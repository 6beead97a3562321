"""One rank's part of a MoE layer: which experts under expert parallelism, which rows and columns under tensor
parallelism."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pagedweight.layout import BlockId, MoeLayer, PackedBlock, Projection


class ExpertShare(NamedTuple):
    """layer: the model's own number. experts: the model's numbers of the experts here, in local order, of `total`.
    intermediate: I here, the part-th of `parts` equal pieces of each expert's."""

    layer: int
    experts: tuple[int, ...]
    total: int
    hidden: int
    intermediate: int
    activation: str
    part: int = 0
    parts: int = 1

    @property
    def shape(self) -> MoeLayer:
        """The layer as this rank computes it, experts numbered from 0."""
        return MoeLayer(self.layer, len(self.experts), self.hidden, self.intermediate, self.activation)

    def cut(self, block: BlockId, packed: PackedBlock) -> PackedBlock:
        """This rank's part of a whole linear-block: rows of gate and of up, columns of down.

        Tables go with the rows; of a down block every rank has them all.
        """
        if self.parts == 1:
            return packed
        if block.projection is Projection.DOWN:
            first = self.part * self.intermediate
            columns = slice(first, first + self.intermediate)
            return PackedBlock(cut_columns(packed.planes, columns), packed.tables, self.intermediate)
        whole = self.intermediate * self.parts
        first = self.part * self.intermediate
        rows = torch.cat([torch.arange(at, at + self.intermediate) for at in (first, whole + first)])
        tables = {bits: table[rows] for bits, table in packed.tables.items()}
        return PackedBlock(packed.planes[:, rows].contiguous(), tables, packed.columns)


def cut_columns(planes: torch.Tensor, columns: slice) -> torch.Tensor:
    """Columns of plain planes (P, N, words) int32, as planes of their own; bits beyond the last are zero."""
    octets = planes.contiguous().numpy().view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, bitorder="little")[..., columns]
    padding = -bits.shape[-1] % 32
    padded = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, padding)])
    return torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view(np.int32))
