"""What each calibration sequence shows of itself, and the damage it would see from every linear-block and width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class SequenceSignals(NamedTuple):
    """R rows, S sequences; float64 arrays, as the runtime would observe them.

    mass: (R, S), routing weight the row's expert got in the sequence. tokens: (R, S), routed tokens.
    features: (R, S, 3), phi of Eq. (5) in raw norms.
    """

    mass: np.ndarray
    tokens: np.ndarray
    features: np.ndarray


class SequenceDamage(NamedTuple):
    """R rows, S sequences, W widths; float64 arrays.

    damage: (R, S, W), the layer's output error from this row alone, summed over the sequence's tokens.
    energy: (R, S, W), the same by column energies: sum_j C_j v_j with C_j = sum_i rows_i (W - W_b)_ij^2 and
        v_j = sum_t r_t^2 x_tj^2. It needs no training, and K products per routed token at run time.
    mass, tokens, features: as in SequenceSignals.
    """

    damage: np.ndarray
    energy: np.ndarray
    mass: np.ndarray
    tokens: np.ndarray
    features: np.ndarray


class _SignalSums:
    """Routing mass and input norms by row and sequence, over the visits of all batches."""

    def __init__(self, layout: Layout, sequences: int) -> None:
        self.layout = layout
        self.first_sequence = 0
        self.mass = torch.zeros(layout.rows, sequences, dtype=torch.float64)
        self.tokens = torch.zeros_like(self.mass)
        self.norms = torch.zeros(layout.rows, sequences, 3, dtype=torch.float64)

    def observe(self, visit: Visit) -> None:
        sequence = (visit.sequence + self.first_sequence).cpu()
        weights = visit.weights.double().cpu()
        for projection, x in zip(Projection, (visit.gate_up_input, visit.down_input), strict=True):
            row, norms = self.row(visit, projection), x.norm(dim=1).double().cpu()
            self.mass[row].index_add_(0, sequence, weights)
            self.tokens[row].index_add_(0, sequence, torch.ones_like(weights))
            self.norms[row, :, 0].index_add_(0, sequence, weights * norms)
            self.norms[row, :, 1].index_add_(0, sequence, weights * norms.square())
            self.norms[row, :, 2].scatter_reduce_(0, sequence, norms, "amax")

    def row(self, visit: Visit, projection: Projection) -> int:
        return self.layout.first_row(visit.layer_index) + 2 * visit.expert + projection

    def signals(self) -> SequenceSignals:
        # request_features wants a projection axis, and every row here is one projection.
        features = request_features(self.mass, self.norms[:, :, None, :])[:, :, 0]
        return SequenceSignals(self.mass.numpy(), self.tokens.numpy(), features.numpy())


class _DamageSums(_SignalSums):
    def __init__(
        self,
        layout: Layout,
        sequences: int,
        modules: Sequence[nn.Module],
        importances: Sequence[tuple[Importance, Importance]],
        block: Callable[[BlockId], PackedBlock],
    ) -> None:
        super().__init__(layout, sequences)
        self._modules, self._importances, self._block = modules, importances, block
        self.damage = torch.zeros(layout.rows, sequences, len(layout.widths), dtype=torch.float64)
        self.energy = torch.zeros_like(self.damage)

    def observe(self, visit: Visit) -> None:
        super().observe(visit)
        self._add(visit, Projection.GATE_UP, visit.gate_up_input, visit.gate_up_stakes)
        self._add(visit, Projection.DOWN, visit.down_input, visit.down_stakes)

    def _add(self, visit: Visit, projection: Projection, x: Tensor, stakes: Tensor) -> None:
        rows = self._importances[visit.layer_index][projection].rows[visit.expert]
        if projection is Projection.DOWN:  # the visit holds all outputs alike; the loss prefers some
            stakes = stakes * (rows * len(rows))
        row, sequence = self.row(visit, projection), (visit.sequence + self.first_sequence).cpu()
        packed = self._block(BlockId(self.layout.moe_layers[visit.layer_index].layer, visit.expert, projection))
        weight = original_weight(self._modules[visit.layer_index], visit.expert, projection)
        energies = visit.weights[:, None].square() * x.square()
        for w, bits in enumerate(self.layout.widths):
            error = weight - dequantize(packed, bits).to(weight.device)
            self.damage[row, :, w].index_add_(0, sequence, ((x @ error.T).square() * stakes).sum(1).double().cpu())
            self.energy[row, :, w].index_add_(0, sequence, (energies @ (rows @ error.square())).double().cpu())


def observe_sequences(
    model: nn.Module, found: Sequence[ExpertsModule], windows: Windows, layout: Layout, *, rows: int = 8
) -> SequenceSignals:
    """One forward pass over the windows, each window a sequence; `rows` at a time."""
    sums = _SignalSums(layout, len(windows.tokens))
    _run(model, found, windows, rows, sums, lambda sequences: None)
    return sums.signals()


def measure_sequences(
    model: nn.Module,
    found: Sequence[ExpertsModule],
    windows: Windows,
    statistics: Statistics,
    layout: Layout,
    block: Callable[[BlockId], PackedBlock],
    *,
    rows: int = 8,
    advance: Callable[[int], None] = lambda sequences: None,
) -> SequenceDamage:
    """observe_sequences with damage. statistics: of the same model. block: the packed linear-blocks."""
    importances = [
        tuple(own.on(experts.device) for own in layer_importance(statistics, index))
        for index, experts in enumerate(found)
    ]
    sums = _DamageSums(layout, len(windows.tokens), [experts.module for experts in found], importances, block)
    _run(model, found, windows, rows, sums, advance)
    return SequenceDamage(sums.damage.numpy(), sums.energy.numpy(), *sums.signals())


def _run(
    model: nn.Module,
    found: Sequence[ExpertsModule],
    windows: Windows,
    rows: int,
    sums: _SignalSums,
    advance: Callable[[int], None],
) -> None:
    for batch in windows.batches(rows, found[0].module.down_proj.device):
        observe_forward(model, [experts.module for experts in found], batch, sums.observe)
        sums.first_sequence += len(batch.tokens)
        advance(len(batch.tokens))
