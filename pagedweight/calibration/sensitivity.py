"""Sensitivity s_i^b (Eq. 2) of every linear-block at every width, in nats per token, and the Policy made of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from pagedweight.calibration.importance import cold_blocks, layer_importance, routing_mass
from pagedweight.calibration.statistics import Statistics
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection
from pagedweight.policy import Policy

FORMS = ("quadratic", "diagonal")


class Sensitivity(NamedTuple):
    """s_bar: float64 (R, W), nats per token if the block's expert had all of its layer's routing mass.

    m_cal: float64 (R,), the routing mass calibration saw (Eq. 1); s_bar * m_cal is s_i^b. Every value is finite.
    cold: linear-blocks of experts that few or no tokens reached, with that number; theirs are shared estimates.
    """

    s_bar: np.ndarray
    m_cal: np.ndarray
    cold: dict[BlockId, int]

    def policy(self, layout: Layout) -> Policy:
        """A policy that knows sensitivity alone."""
        return Policy.from_sensitivity(layout, self.s_bar, self.m_cal)


def measure_sensitivity(
    layout: Layout,
    experts: Sequence[nn.Module],
    statistics: Statistics,
    block: Callable[[BlockId], PackedBlock],
    *,
    form: str = "quadratic",
) -> Sensitivity:
    """Eq. (2) for every block and width. experts: the layout's layers' original modules. block: the packed blocks.

    form: "diagonal" is Eq. (2) itself; "quadratic" adds the guided second moment's correlations, which matter once
    codes were chosen with them (a diagonal then overrates the damage, unevenly over widths). Warns of cold experts.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; use {' or '.join(FORMS)}")
    s_bar, m_cal = [], []
    for layer_index, (shape, module) in enumerate(zip(layout.moe_layers, experts, strict=True)):
        importances = layer_importance(statistics, layer_index)
        mass = routing_mass(statistics.layers[layer_index]).tolist()
        for expert in range(shape.experts):
            for projection in Projection:
                packed = block(BlockId(shape.layer, expert, projection))
                weight = original_weight(module, expert, projection)
                s_bar.append(importances[projection].s_bar(expert, weight, packed, layout.widths, form))
                m_cal.append(mass[expert])
    warn_of_cold_experts(statistics)
    return Sensitivity(np.array(s_bar), np.array(m_cal), cold_blocks(statistics))


def warn_of_cold_experts(statistics: Statistics) -> None:
    """One warning that counts and names the experts which share their layer's figures."""
    experts = sorted({(block.layer, block.expert) for block in cold_blocks(statistics)})
    if experts:
        warnings.warn(
            f"{len(experts)} experts saw too few calibration tokens for figures of their own and got their layer's: "
            + ", ".join(f"layers.{layer}.experts.{expert}" for layer, expert in experts[:20])
            + (", ..." if len(experts) > 20 else ""),
            stacklevel=3,
        )


def original_weight(module: nn.Module, expert: int, projection: Projection) -> Tensor:
    """(N, K) fp32 of one linear-block of a fused experts module."""
    weights = module.gate_up_proj if projection is Projection.GATE_UP else module.down_proj
    return weights[expert].detach().float()
