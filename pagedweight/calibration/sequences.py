"""Damage that each calibration sequence would see from every linear-block at every width, beside what predicts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pagedweight.bitplane import dequantize
from pagedweight.calibration.capture import Visit, observe_forward
from pagedweight.calibration.importance import Importance, layer_importance
from pagedweight.calibration.sensitivity import original_weight
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.text import Windows
from pagedweight.discovery import ExpertsModule
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection
from pagedweight.runtime.observe import request_features


class SequenceDamage(NamedTuple):
    """R rows, S sequences, W widths; float64 arrays.

    damage: (R, S, W), the layer's output error from this row alone, summed over the sequence's tokens.
    energy: (R, S, W), the same by column energies: sum_j C_j v_j with C_j = sum_i rows_i (W - W_b)_ij^2 and
        v_j = sum_t r_t^2 x_tj^2. It needs no training, and K products per routed token at run time.
    mass: (R, S), routing weight the row's expert got in the sequence. tokens: (R, S), routed tokens.
    features: (R, S, 3), phi of Eq. (5) in raw norms, as the runtime computes it.
    """

    damage: np.ndarray
    energy: np.ndarray
    mass: np.ndarray
    tokens: np.ndarray
    features: np.ndarray


class _Sums:
    """Running sums over the visits of all batches."""

    def __init__(
        self,
        layout: Layout,
        modules: list[nn.Module],
        importances: list[tuple[Importance, Importance]],
        block: Callable[[BlockId], PackedBlock],
        sequences: int,
    ) -> None:
        self.layout, self.modules, self.importances, self.block = layout, modules, importances, block
        self.first_sequence = 0
        shape = (layout.rows, sequences)
        self.damage = torch.zeros(*shape, len(layout.widths), dtype=torch.float64)
        self.energy = torch.zeros_like(self.damage)
        self.mass = torch.zeros(shape, dtype=torch.float64)
        self.tokens = torch.zeros(shape, dtype=torch.float64)
        self.norms = torch.zeros(*shape, 3, dtype=torch.float64)

    def observe(self, visit: Visit) -> None:
        inputs = (visit.gate_up_input, visit.down_input)
        stakes = (visit.gate_up_stakes, visit.down_stakes)
        sequence = (visit.sequence + self.first_sequence).cpu()
        for projection in Projection:
            self._add(visit, projection, inputs[projection], stakes[projection], sequence)

    def _add(self, visit: Visit, projection: Projection, x: Tensor, stakes: Tensor, sequence: Tensor) -> None:
        row = self.layout.first_row(visit.layer_index) + 2 * visit.expert + projection
        importance = self.importances[visit.layer_index][projection]
        rows = importance.rows[visit.expert]
        if projection is Projection.DOWN:  # all outputs alike in the visit; the loss prefers some
            stakes = stakes * (rows * len(rows))
        identifier = BlockId(self.layout.moe_layers[visit.layer_index].layer, visit.expert, projection)
        packed = self.block(identifier)
        weight = original_weight(self.modules[visit.layer_index], visit.expert, projection)
        energies = visit.weights[:, None].square() * x.square()
        for w, bits in enumerate(self.layout.widths):
            error = weight - dequantize(packed, bits).to(weight.device)
            self.damage[row, :, w].index_add_(0, sequence, ((x @ error.T).square() * stakes).sum(1).double().cpu())
            column_damage = rows @ error.square()
            self.energy[row, :, w].index_add_(0, sequence, (energies @ column_damage).double().cpu())
        self._add_norms(row, visit.weights.double().cpu(), x.norm(dim=1).double().cpu(), sequence)

    def _add_norms(self, row: int, weights: Tensor, norms: Tensor, sequence: Tensor) -> None:
        self.mass[row].index_add_(0, sequence, weights)
        self.tokens[row].index_add_(0, sequence, torch.ones_like(weights))
        self.norms[row, :, 0].index_add_(0, sequence, weights * norms)
        self.norms[row, :, 1].index_add_(0, sequence, weights * norms.square())
        self.norms[row, :, 2].scatter_reduce_(0, sequence, norms, "amax")


def measure_sequences(
    model: nn.Module,
    found: list[ExpertsModule],
    windows: Windows,
    statistics: Statistics,
    layout: Layout,
    block: Callable[[BlockId], PackedBlock],
    *,
    rows: int = 8,
    advance: Callable[[int], None] = lambda sequences: None,
) -> SequenceDamage:
    """One forward pass over the windows, each window a sequence; `rows` at a time. block: the packed linear-blocks."""
    importances = [layer_importance(statistics, index) for index in range(len(found))]
    modules = [experts.module for experts in found]
    sums = _Sums(layout, modules, importances, block, len(windows.tokens))
    for batch in windows.batches(rows, found[0].module.down_proj.device):
        observe_forward(model, modules, batch, sums.observe)
        sums.first_sequence += len(batch.tokens)
        advance(len(batch.tokens))
    # request_features wants a projection axis; every row here is one block, so both of its entries are the same.
    features = request_features(sums.mass, sums.norms[:, :, None, :])[:, :, 0]
    return SequenceDamage(*(t.numpy() for t in (sums.damage, sums.energy, sums.mass, sums.tokens, features)))
