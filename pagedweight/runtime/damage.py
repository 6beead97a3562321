"""Predicted damage of a bitwidth transition, Eq. (4), (5), (6) and (8), as pure functions on arrays that broadcast."""

from __future__ import annotations

import numpy as np


def global_damage(sensitivity_from: np.ndarray, sensitivity_to: np.ndarray) -> np.ndarray:
    """g of lowering from one width to another, from the sensitivities s at both, Eq. (4)."""
    return np.maximum(sensitivity_to - sensitivity_from, 0.0)


def log_residual(weights: np.ndarray, bias: np.ndarray, features: np.ndarray) -> np.ndarray:
    """rho-hat, the residual head's prediction from phi, Eq. (5). weights, features: (3, ...); bias: (...)."""
    rho = weights[0] * features[0] + bias
    rho += weights[1] * features[1]
    rho += weights[2] * features[2]
    return rho


def residual_factor(
    log_residual: np.ndarray, confidence: np.ndarray, alpha: float, rho_min: float, rho_max: float
) -> np.ndarray:
    """eta, the factor by which this prompt's damage departs from the average, Eq. (6); 1 at zero confidence."""
    exponent = np.clip(log_residual, rho_min, rho_max)
    exponent *= alpha * confidence
    return np.exp(exponent)


def predicted_damage(
    global_damage: np.ndarray, multiplier: np.ndarray, residual_factor: np.ndarray | float, epsilon: float
) -> np.ndarray:
    """d-hat, what the greedy weighs against bytes, Eq. (8); never below epsilon."""
    damage = multiplier * global_damage
    damage *= residual_factor
    return np.maximum(epsilon, damage)
