"""Running sums of the per-token Fisher information of every linear-block, whatever the number of samples.

For a block of weights W (N, K) with inputs x_t and output gradients g_t, F_ij = sum_t g_ti^2 x_tj^2. It is kept in
rank-1 form by its two marginals, plus the guided second moment H = sum_t s_t x_t x_t^T with s_t = sum_i g_ti^2. gate_up
inputs are the layer's, so where every expert's own H would take too much memory one is pooled over the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagedweight.calibration.capture import Visit
from pagedweight.calibration.importance import Importance, layer_importance, routing_mass
from pagedweight.layout import MoeLayer, Projection

# fp32 second moments of wider inputs would not fit: at 14336 columns one expert's alone is 0.8 GB.
MOMENT_COLUMNS = 8192
# Of a layer's gate_up: the tiny trained model's KL at 2 to 4 bits is 5 to 7 % lower with each expert's own moment.
OWN_MOMENT_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class BlockSums:
    """Sums of one projection of one layer, in place. E experts, N x K a linear-block.

    columns: fp64 (E, K), sum_i F_ij. rows: fp64 (E, N), sum_j F_ij. total: fp64 (E,), sum_ij F_ij.
    moment: fp32 (E, K, K), or (1, K, K) pooled over the experts; None where K is above the limit.
    """

    columns: Tensor
    rows: Tensor
    total: Tensor
    moment: Tensor | None

    @classmethod
    def zeros(cls, experts: int, rows: int, columns: int, moments: int, device: torch.device) -> BlockSums:
        small = {"dtype": torch.float64, "device": device}
        return cls(
            torch.zeros(experts, columns, **small),
            torch.zeros(experts, rows, **small),
            torch.zeros(experts, **small),
            torch.zeros(moments, columns, columns, device=device) if moments else None,
        )

    def add(self, expert: int, x: Tensor, stakes: Tensor) -> None:
        """x: fp32 (n, K), block inputs. stakes: fp32 (n, N), squared output gradients."""
        stake, energy, squares = stakes.sum(1), x.square().sum(1), x.square()
        self.columns[expert] += stake @ squares
        self.rows[expert] += energy @ stakes
        self.total[expert] += stake.double() @ energy.double()
        if self.moment is not None:
            self.moment[expert if len(self.moment) > 1 else 0].addmm_((x * stake[:, None]).T, x)

    def scale(self, factor: float) -> None:
        for sums in (self.columns, self.rows, self.total, self.moment):
            if sums is not None:
                sums *= factor


@dataclass(frozen=True, eq=False)
class LayerSums:
    """One MoE layer's sums. mass: fp64 (E,), sum of routing weights. counts: int64 (E,), routed tokens, no padding."""

    shape: MoeLayer
    mass: Tensor
    counts: Tensor
    blocks: tuple[BlockSums, BlockSums]

    @classmethod
    def zeros(
        cls, shape: MoeLayer, device: torch.device, moment_columns: int, own_moment_bytes: int = OWN_MOMENT_BYTES
    ) -> LayerSums:
        blocks = []
        for projection in Projection:
            rows, columns = shape.shape(projection)
            own = projection is Projection.DOWN or 4 * shape.experts * columns**2 <= own_moment_bytes
            moments = 0 if columns > moment_columns else shape.experts if own else 1
            blocks.append(BlockSums.zeros(shape.experts, rows, columns, moments, device))
        return cls(
            shape,
            torch.zeros(shape.experts, dtype=torch.float64, device=device),
            torch.zeros(shape.experts, dtype=torch.int64, device=device),
            tuple(blocks),
        )


@dataclass(eq=False)
class Statistics:
    """Everything calibration sums up over its sequences. tokens: observed tokens. sequences: batch rows seen."""

    layers: Sequence[LayerSums]
    tokens: int = 0
    sequences: int = 0

    @classmethod
    def zeros(
        cls, shapes: Sequence[MoeLayer], experts: Sequence[nn.Module], *, moment_columns: int = MOMENT_COLUMNS
    ) -> Statistics:
        """Empty sums, each layer's on its experts' device. moment_columns: 0 keeps no second moments."""
        return cls(
            tuple(
                LayerSums.zeros(shape, module.down_proj.device, moment_columns)
                for shape, module in zip(shapes, experts, strict=True)
            )
        )

    def observe(self, visit: Visit) -> None:
        """Add one expert's share of one forward."""
        layer = self.layers[visit.layer_index]
        layer.mass[visit.expert] += visit.weights.double().sum()
        layer.counts[visit.expert] += len(visit.weights)
        layer.blocks[Projection.GATE_UP].add(visit.expert, visit.gate_up_input, visit.gate_up_stakes)
        layer.blocks[Projection.DOWN].add(visit.expert, visit.down_input, visit.down_stakes)

    def importance(self, layer_index: int) -> tuple[Importance, Importance]:
        """What gate_up's and down's errors in one layer are weighed with."""
        return layer_importance(self, layer_index)

    def routing_mass(self, layer_index: int) -> Tensor:
        """Eq. (1), fp64 (E,), of one layer."""
        return routing_mass(self.layers[layer_index])

    def check_layers(self, moe_layers: Sequence[MoeLayer]) -> None:
        """ValueError unless these are of experts like a model's."""
        if tuple(layer.shape for layer in self.layers) != tuple(moe_layers):
            raise ValueError(f"the statistics are of {len(self.layers)} layers of other experts; calibrate this model")

    def check(self) -> None:
        """ValueError when nothing was observed, or when a sum is not finite."""
        for layer in self.layers:
            if not layer.counts.any():
                raise ValueError(
                    f"calibration observed no routed token in MoE layer {layer.shape.layer}; give at least one "
                    "sequence with unmasked tokens, of a model whose experts are called with (hidden, ids, weights)"
                )
            for block in layer.blocks:
                if not block.total.isfinite().all():
                    raise ValueError(
                        f"calibration of MoE layer {layer.shape.layer} met NaN or infinite activations or gradients; "
                        "run the model in fp32 or bf16"
                    )
