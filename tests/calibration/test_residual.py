"""Prompt residual: per-sequence damage against a plain loop, and heads that find a law planted in the data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.calibration.capture import observe_forward
from pagedweight.calibration.importance import layer_importance
from pagedweight.calibration.residual import better_residual, fit_residual
from pagedweight.calibration.sequences import SequenceDamage, measure_sequences
from pagedweight.calibration.text import Windows
from pagedweight.discovery import find_experts
from pagedweight.layout import BlockId, Layout, MoeLayer, Projection
from pagedweight.policy import Policy
from tests.calibration.support import WIDTHS, batch, blocks_of, error_of, layout_of, modules_of, statistics_of
from tests.hf_models import mixtral_m8


def test_damage_of_a_sequence_is_summed_token_by_token() -> None:
    model, given = mixtral_m8(), batch(3, 6, padding=2)
    packed, statistics, layout = blocks_of(model), statistics_of(model, given), layout_of(model)
    windows = Windows(given.tokens, given.mask, 0)
    measured = measure_sequences(model, find_experts(model), windows, statistics, layout, packed.__getitem__, rows=2)
    expected = {name: np.zeros_like(values) for name, values in measured._asdict().items()}
    visits = []
    observe_forward(model, modules_of(model), given, visits.append)
    for visit in visits:
        for projection in Projection:
            block = BlockId(visit.layer_index, visit.expert, projection)
            row = layout.row(block)
            inputs = (visit.gate_up_input, visit.down_input)[projection].double()
            stakes = (visit.gate_up_stakes, visit.down_stakes)[projection].double()
            profile = layer_importance(statistics, visit.layer_index)[projection].rows[visit.expert].double()
            for t, sequence in enumerate(visit.sequence.tolist()):
                for w, bits in enumerate(WIDTHS):
                    error = error_of(model, block, packed[block], bits).double()
                    outputs = (error @ inputs[t]) ** 2 * stakes[t]
                    outputs = outputs * profile * 64 if projection is Projection.DOWN else outputs
                    expected["damage"][row, sequence, w] += outputs.sum()
                    columns = profile @ error**2
                    expected["energy"][row, sequence, w] += visit.weights[t] ** 2 * (columns @ inputs[t] ** 2)
                expected["mass"][row, sequence] += visit.weights[t]
                expected["tokens"][row, sequence] += 1
                norm = inputs[t].norm()
                expected["features"][row, sequence] += torch.stack(
                    [visit.weights[t] * norm, visit.weights[t] * norm**2, norm * 0]
                ).numpy()
                expected["features"][row, sequence, 2] = max(expected["features"][row, sequence, 2], norm)
    for name in ("damage", "energy", "mass", "tokens"):
        np.testing.assert_allclose(getattr(measured, name), expected[name], rtol=1e-3, atol=1e-12)
    seen = expected["mass"] > 0
    mean = expected["features"][seen][:, 0] / expected["mass"][seen]
    rms = np.sqrt(expected["features"][seen][:, 1] / expected["mass"][seen])
    phi = np.stack([mean, rms, expected["features"][seen][:, 2]], axis=1)
    np.testing.assert_allclose(measured.features[seen], phi, rtol=1e-4)


def planted(sequences: int = 80, noise: float = 0.1, seed: int = 0) -> tuple[SequenceDamage, Layout]:
    """Down damage per mass goes with the square of the RMS norm; gate_up's has nothing to do with norms."""
    rng = np.random.default_rng(seed)
    layout = Layout((MoeLayer(0, 6, 8, 8),), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
    shape = (layout.rows, sequences)
    mass, rms = rng.uniform(1, 3, shape), np.exp(rng.normal(0, 0.5, shape))
    per_mass = np.where(np.arange(layout.rows)[:, None] % 2 == 1, rms**2, 1.0)
    per_mass = per_mass * np.exp(rng.normal(0, noise, shape)) * rng.uniform(0.5, 2, (layout.rows, 1))
    damage = (mass * per_mass)[..., None] * 4.0 ** -np.array(WIDTHS)
    features = np.stack([0.9 * rms, rms, 1.5 * rms], axis=-1)
    return SequenceDamage(damage, damage, mass, np.full(shape, 9.0), features), layout


def test_heads_find_a_planted_law() -> None:
    measured, layout = planted()
    residual = fit_residual(measured, layout)
    up, down = residual.confidence[0], residual.confidence[1]
    legal = np.tril_indices(len(WIDTHS), -1)
    assert (down[legal] > 0.9).all()
    assert (up[legal] < 0.1).all()
    assert not np.triu(down).any()
    # phi's three norms move together, so only the sum of their weights is fixed: the exponent.
    np.testing.assert_allclose(residual.weights[1][legal].sum(-1), 2.0, atol=0.1)
    np.testing.assert_allclose(residual.energy_r2[1][legal], 1.0)
    assert residual.rho_min < -1 < 1 < residual.rho_max


def test_log_features_beat_raw_ones_on_a_power_law() -> None:
    measured, layout = planted()
    log, raw = (fit_residual(measured, layout, feature_transform=kind).confidence[1, 1, 0] for kind in ("log", "raw"))
    assert log > raw > 0.3


def test_centered_features_see_past_differences_between_blocks() -> None:
    """Blocks whose inputs are always large hide the law from heads that all blocks share."""
    measured, layout = planted()
    block_scale = np.exp(np.random.default_rng(1).normal(0, 3, (12, 1, 1)))
    measured = measured._replace(features=measured.features * block_scale)
    shared, centered = (fit_residual(measured, layout, centered=c).confidence[1, 1, 0] for c in (False, True))
    assert shared < 0.5 < 0.9 < centered
    chosen = better_residual(measured, layout)
    assert chosen.kind == "centered"
    policy = chosen.added_to(Policy.from_sensitivity(layout, np.ones((12, 3)), np.ones(12)))
    np.testing.assert_array_equal(policy.feature_center, chosen.feature_center)
    # Per-row shifts of log norms are what the centre takes away.
    np.testing.assert_allclose(policy.feature_center, np.log(measured.features).mean(1), atol=0.2)


def test_held_out_sequences_do_not_train() -> None:
    """With held-out sequences of the opposite law, confidence is floored at zero."""
    measured, layout = planted()
    held_out = np.random.default_rng(0).permutation(80)[:20]
    per_mass = measured.damage / measured.mass[..., None]
    per_mass[:, held_out] = 4.0 ** (-2.0 * np.array(WIDTHS)) / per_mass[:, held_out]
    residual = fit_residual(measured._replace(damage=per_mass * measured.mass[..., None]), layout)
    assert residual.head_r2[1, 1, 0] < 0
    assert residual.confidence[1, 1, 0] == 0


def test_unseen_and_undamaged_pairs_are_left_out() -> None:
    measured, layout = planted()
    measured.damage[3, 5] = measured.damage[3, 5, -1]  # no damage from any width
    measured.mass[4], measured.tokens[4], measured.features[4] = 0, 0, 0  # never reached
    residual = fit_residual(measured, layout)
    for array in residual[:3]:
        assert np.isfinite(array).all()


def test_a_residual_makes_a_policy() -> None:
    measured, layout = planted()
    policy = Policy.from_sensitivity(layout, np.ones((12, 3)), np.full(12, 1 / 6))
    changed = fit_residual(measured, layout).added_to(policy)
    assert changed.alpha == 1.0
    assert changed.feature_transform == "log"
    assert changed.head_confidence.max() > 0.9


def test_too_few_sequences_are_refused() -> None:
    measured, layout = planted(sequences=7)
    with pytest.raises(ValueError, match="7 calibration sequences are too few"):
        fit_residual(measured, layout)
