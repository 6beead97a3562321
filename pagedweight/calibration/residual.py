"""Prompt residual heads (Eq. 5): how a sequence's damage departs from the average, from its input norms alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.calibration.sequences import SequenceDamage
from pagedweight.layout import Layout
from pagedweight.policy import Policy

FEWEST_SEQUENCES = 8
HELD_OUT_SHARE = 0.25
FEWEST_TOKENS = 4  # a sequence that routed fewer to an expert says little of what it usually does there
RIDGE = 1e-3  # of the features' variance: the three norms are nearly collinear
CLIP_QUANTILES = (0.01, 0.99)


class Residual(NamedTuple):
    """Heads by projection, from- and to-width index, for from above to; zero elsewhere. W widths.

    weights: (2, W, W, 3), bias: (2, W, W), confidence: (2, W, W), held-out R^2 of the head, floored at 0.
    head_r2, energy_r2: (2, W, W), held-out R^2 of the heads and of the column energies; NaN where nothing was left.
    rho_min, rho_max: quantiles of the log residuals seen. feature_transform: "log" or "raw".
    feature_center: (R, 3), each row's average features, which the heads read features from; zero where not centered.
    """

    weights: np.ndarray
    bias: np.ndarray
    confidence: np.ndarray
    head_r2: np.ndarray
    energy_r2: np.ndarray
    rho_min: float
    rho_max: float
    feature_transform: str
    feature_center: np.ndarray

    def added_to(self, policy: Policy, alpha: float = 1.0) -> Policy:
        """The policy with these heads."""
        return policy.replaced(
            head_weights=self.weights,
            head_bias=self.bias,
            head_confidence=self.confidence,
            feature_center=self.feature_center,
            alpha=alpha,
            rho_min=self.rho_min,
            rho_max=self.rho_max,
            feature_transform=self.feature_transform,
        )

    @property
    def kind(self) -> str:
        """How the heads read features: "paper" as they are, "centered" from each row's average."""
        return "centered" if self.feature_center.any() else "paper"

    @property
    def mean_r2(self) -> float:
        """Held-out R^2, floored at 0, averaged over projections and transitions; 0 where nothing could be fitted."""
        fitted = np.isfinite(self.head_r2)
        return float(self.confidence[fitted].mean()) if fitted.any() else 0.0


class _Samples(NamedTuple):
    """(row, sequence) pairs of one projection and transition. rho, energy: (n,). features: (n, 3). held_out: (n,)."""

    rho: np.ndarray
    energy: np.ndarray
    features: np.ndarray
    held_out: np.ndarray


def fit_residual(
    measured: SequenceDamage,
    layout: Layout,
    *,
    feature_transform: str = "log",
    centered: bool = False,
    seed: int = 0,
) -> Residual:
    """One linear head for each projection and transition; a quarter of the sequences is held out to score it.

    feature_transform: "log" or "raw" norms. centered: read them from each linear-block's own average, which tells a
    prompt that is unusual for a block from a block whose inputs are always large.
    ValueError with fewer than eight sequences.
    """
    sequences = measured.mass.shape[1]
    if sequences < FEWEST_SEQUENCES:
        raise ValueError(
            f"{sequences} calibration sequences are too few to train residual heads; give {FEWEST_SEQUENCES}"
        )
    held_out = np.zeros(sequences, dtype=bool)
    chosen = np.random.default_rng(seed).permutation(sequences)[: max(2, round(HELD_OUT_SHARE * sequences))]
    held_out[chosen] = True
    widths = len(layout.widths)
    features, center = _features(measured, ~held_out, feature_transform, centered)
    weights, bias = np.zeros((2, widths, widths, 3)), np.zeros((2, widths, widths))
    head_r2, energy_r2 = np.full_like(bias, np.nan), np.full_like(bias, np.nan)
    seen = []
    for projection in (0, 1):
        rows = np.arange(layout.rows) % 2 == projection
        for high in range(1, widths):
            for low in range(high):
                samples = _samples(measured, features, rows, high, low, held_out)
                if samples is None:
                    continue
                at = (projection, high, low)
                weights[at], bias[at] = _fit(samples.features[~samples.held_out], samples.rho[~samples.held_out])
                head_r2[at] = _r2(samples, samples.features @ weights[at] + bias[at])
                energy_r2[at] = _r2(samples, samples.energy)
                seen.append(samples.rho)
    rho_min, rho_max = np.quantile(np.concatenate(seen), CLIP_QUANTILES) if seen else (-1.0, 1.0)
    confidence = np.clip(np.nan_to_num(head_r2), 0.0, 1.0)
    return Residual(
        weights, bias, confidence, head_r2, energy_r2, float(rho_min), float(rho_max), feature_transform, center
    )


def better_residual(
    measured: SequenceDamage, layout: Layout, *, feature_transform: str = "log", seed: int = 0
) -> Residual:
    """The heads that explain more of held-out sequences: on features as they are, or from each row's own average."""
    fits = [
        fit_residual(measured, layout, feature_transform=feature_transform, centered=c, seed=seed)
        for c in (False, True)
    ]
    return max(fits, key=lambda fit: fit.mean_r2)


def _features(
    measured: SequenceDamage, training: np.ndarray, feature_transform: str, centered: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What the heads read, (R, S, 3), and each row's centre (R, 3) on the training sequences."""
    features = measured.features
    if feature_transform == "log":
        features = np.log(np.maximum(features, 1e-30))
    seen = (measured.mass > 0) & training
    center = (features * seen[..., None]).sum(1) / np.maximum(seen.sum(1), 1)[:, None] * centered
    return features - center[:, None], center


def _samples(
    measured: SequenceDamage, features: np.ndarray, rows: np.ndarray, high: int, low: int, held_out: np.ndarray
) -> _Samples | None:
    """Log residuals of one transition, per routing mass and against the training sequences' average of each row."""
    mass = measured.mass[rows]
    damage = measured.damage[rows][..., low] - measured.damage[rows][..., high]
    energy = measured.energy[rows][..., low] - measured.energy[rows][..., high]
    usable = (measured.tokens[rows] >= FEWEST_TOKENS) & (damage > 0) & (energy > 0)
    training = usable & ~held_out
    known = training.any(1, keepdims=True)
    usable &= known
    if not (usable & ~held_out).any() or not (usable & held_out).any():
        return None
    return _Samples(
        _log_ratio(damage, mass, training)[usable],
        _log_ratio(energy, mass, training)[usable],
        features[rows][usable],
        np.broadcast_to(held_out, usable.shape)[usable],
    )


def _log_ratio(damage: np.ndarray, mass: np.ndarray, training: np.ndarray) -> np.ndarray:
    """rho (rows, S): log of the sequence's damage per mass over the row's average on training sequences."""
    average = (damage * training).sum(1) / np.maximum((mass * training).sum(1), 1e-30)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(damage / mass) - np.log(average)[:, None]


def _fit(features: np.ndarray, rho: np.ndarray) -> tuple[np.ndarray, float]:
    center = features.mean(0)
    scale = features.std(0) + 1e-12
    x = (features - center) / scale
    weights = np.linalg.solve(x.T @ x + RIDGE * len(x) * np.eye(3), x.T @ (rho - rho.mean())) / scale
    return weights, float(rho.mean() - weights @ center)


def _r2(samples: _Samples, predicted: np.ndarray) -> float:
    """Share of the held-out log residuals' variance, about the training mean, that a prediction explains."""
    rho, guess = samples.rho[samples.held_out], samples.rho[~samples.held_out].mean()
    return float(1 - ((rho - predicted[samples.held_out]) ** 2).sum() / ((rho - guess) ** 2).sum())
