"""Column energies in the trained heads' place: what each window's own inputs say of every linear-block's damage.

A head predicts a prompt's log residual (Eq. 5) from three norms; column energies add up the squared inputs of every
column, weighed by the squared error that each width has there, which costs K products for each routed token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bench.quality_parts import Trained
from pagedweight.calibration.sequences import SequenceDamage, measure_sequences
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.text import Windows
from pagedweight.layout import BlockId, PackedBlock, Projection
from pagedweight.policy import Policy

CENTER_WINDOWS = 64


class Energies(NamedTuple):
    """usual: (R, W), energy of each width beyond the parent's, per routing mass, in calibration text.
    trust: (2, W), held-out R^2 by projection, as the heads' confidence is theirs."""

    trained: Trained
    statistics: Statistics
    blocks: Mapping[BlockId, PackedBlock]
    usual: np.ndarray
    trust: np.ndarray

    @classmethod
    def of(
        cls,
        trained: Trained,
        statistics: Statistics,
        blocks: Mapping[BlockId, PackedBlock],
        calibration: Mapping[str, Any],
    ) -> Energies:
        """calibration: calibration's report, whose held-out R^2 say how far energies can be trusted."""
        seen = _measured(trained, statistics, blocks, trained.calibration.first(CENTER_WINDOWS))
        usual = _beyond_parent(seen).sum(1) / np.maximum(seen.mass.sum(1), 1e-30)[:, None]
        *lower, parent = trained.layout.widths
        fits = calibration["residual_held_out_r2"]
        trust = [[fits[p.label].get(f"{parent}->{b}", (0.0, 0.0))[1] for b in lower] + [0.0] for p in Projection]
        return cls(trained, statistics, blocks, usual, np.clip(trust, 0.0, 1.0))

    def factors(self, windows: Windows, policy: Policy) -> np.ndarray:
        """(n, R, W), eta of each window for lowering from the parent width; 1 where a row saw no token."""
        seen = _measured(self.trained, self.statistics, self.blocks, windows)
        own = _beyond_parent(seen) / np.maximum(seen.mass, 1e-30)[..., None]
        known = (seen.mass[..., None] > 0) & (own > 0) & (self.usual[:, None] > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rho = np.where(known, np.log(own / self.usual[:, None]), 0.0)
        trust = self.trust[policy.experts.projection][:, None]
        return np.exp(trust * np.clip(rho, policy.rho_min, policy.rho_max)).transpose(1, 0, 2)


def adjusted(policy: Policy, factor: np.ndarray) -> Policy:
    """The policy for one window: its damage from the parent width times factor (R, W), heads left out."""
    parent = policy.s_bar[:, -1:]
    return policy.replaced(s_bar=parent + np.maximum(policy.s_bar - parent, 0.0) * factor, alpha=0.0)


def _measured(
    trained: Trained, statistics: Statistics, blocks: Mapping[BlockId, PackedBlock], windows: Windows
) -> SequenceDamage:
    return measure_sequences(trained.model, trained.found, windows, statistics, trained.layout, blocks.__getitem__)


def _beyond_parent(seen: SequenceDamage) -> np.ndarray:
    """(R, S, W), energy of each width beyond the parent's."""
    return np.maximum(seen.energy - seen.energy[..., -1:], 0.0)
