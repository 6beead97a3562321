"""Equations (4), (5), (6) and (8) against literal transcriptions, one number at a time."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.runtime.damage import global_damage, log_residual, predicted_damage, residual_factor

numbers = st.floats(-1e3, 1e3)
amounts = st.floats(0, 1e3)
shares = st.floats(0, 1)


@given(amounts, amounts)
def test_global_damage_is_equation_4(s_b: float, s_lower: float) -> None:
    g = max(s_lower - s_b, 0)
    assert global_damage(np.array(s_b), np.array(s_lower)) == g


@given(st.lists(numbers, min_size=3, max_size=3), st.lists(numbers, min_size=3, max_size=3), numbers)
def test_log_residual_is_equation_5(w: list[float], phi: list[float], a: float) -> None:
    rho = sum(w_i * phi_i for w_i, phi_i in zip(w, phi, strict=True)) + a
    assert math.isclose(log_residual(np.array(w), np.array(a), np.array(phi)), rho, rel_tol=1e-12, abs_tol=1e-9)


@given(numbers, shares, st.floats(0, 2), st.floats(-3, 0), st.floats(0, 3))
def test_residual_factor_is_equation_6(rho: float, c: float, alpha: float, rho_min: float, rho_max: float) -> None:
    clipped = min(max(rho, rho_min), rho_max)
    eta = math.exp(alpha * c * clipped)
    assert math.isclose(residual_factor(np.array(rho), np.array(c), alpha, rho_min, rho_max), eta, rel_tol=1e-12)


@given(amounts, amounts, amounts, st.floats(1e-9, 1))
def test_predicted_damage_is_equation_8(g: float, mu: float, eta: float, epsilon: float) -> None:
    d = max(epsilon, mu * g * eta)
    assert predicted_damage(np.array(g), np.array(mu), np.array(eta), epsilon) == d


@given(numbers, st.floats(0, 2))
def test_no_confidence_leaves_the_average(rho: float, alpha: float) -> None:
    assert residual_factor(np.array(rho), np.array(0.0), alpha, -1.0, 1.0) == 1.0
