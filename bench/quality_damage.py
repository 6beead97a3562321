"""How well predicted damage ranks single linear-blocks and whole plans, and what residual predictors explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from quality_parts import WIDTHS, Setup, code_bytes, first_windows
from scipy.stats import spearmanr

from pagedweight.calibration.divergence import diverge, take_reference
from pagedweight.calibration.gains import measure_gains, with_gains
from pagedweight.calibration.residual import fit_residual
from pagedweight.calibration.sensitivity import FORMS, measure_sensitivity
from pagedweight.calibration.sequences import measure_sequences, observe_sequences
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.substitution import Substitution, substituted
from pagedweight.calibration.text import Windows
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection

PLAN_MEAN_BITS = 3.5
SINGLE_BLOCK_BITS = 3
GAINS = "quadratic, measured layer gains"
LIVE = "quadratic, measured layer gains, the text's own routing mass"
Predictions = dict[str, np.ndarray]


def measure_damage(
    setup: Setup,
    statistics: Statistics,
    blocks: Mapping[BlockId, PackedBlock],
    windows: int,
    plans: int,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Predicted and measured divergence of every block alone and of random plans, and held-out R^2 of residuals."""
    few = setup._replace(references={k: first_windows(r, windows) for k, r in setup.references.items()})
    drawn = random_plans(setup.layout, plans, PLAN_MEAN_BITS, seed=0)
    alone = np.diag(np.full(setup.layout.rows, SINGLE_BLOCK_BITS))
    with substituted(setup.found, setup.layout, blocks.__getitem__) as weights:
        predictions = predict(few, statistics, blocks, weights)
        # The residual pass needs the model's own weights, which the substitution holds until its first plan.
        residual = measure_residual(setup, statistics, blocks)
        singles = [mean_kl(few, weights, plan, advance) for plan in alone]
        planned = [mean_kl(few, weights, plan, advance) for plan in drawn]
    rows = np.arange(setup.layout.rows)
    return {
        "plans": {"measured": planned} | {k: [_total(s, plan) for plan in drawn] for k, s in predictions.items()},
        "blocks": {"measured": singles}
        | {k: s[rows, WIDTHS.index(SINGLE_BLOCK_BITS)].tolist() for k, s in predictions.items()},
        "residual": residual,
    }


def predict(
    setup: Setup, statistics: Statistics, blocks: Mapping[BlockId, PackedBlock], weights: Substitution
) -> Predictions:
    """s_i^b (R, W) by form, with gains measured on calibration text, and for the routing of the text it is tried on."""
    modules = [experts.module for experts in setup.found]
    forms = {
        form: measure_sensitivity(setup.layout, modules, statistics, blocks.__getitem__, form=form) for form in FORMS
    }
    reference = take_reference(setup.model, setup.calibration.first(8))
    gains = measure_gains(setup.model, reference, setup.layout, forms["quadratic"], weights)
    forms[GAINS] = with_gains(forms["quadratic"], setup.layout, gains)
    live = np.mean([live_mass(setup, reference.windows) for reference in setup.references.values()], axis=0)
    predictions = {name: table.s_bar * table.m_cal[:, None] for name, table in forms.items()}
    return predictions | {LIVE: forms[GAINS].s_bar * live[:, None]}


def live_mass(setup: Setup, windows: Windows) -> np.ndarray:
    """(R,) routing mass of each row's expert on some windows, Eq. (1)."""
    mass = observe_sequences(setup.model, setup.found, windows, setup.layout).mass.sum(1)
    first = [setup.layout.first_row(index) for index in range(len(setup.layout.moe_layers))]
    totals = np.add.reduceat(mass, first) / 2  # every expert has two rows
    return mass / np.repeat(totals, [2 * shape.experts for shape in setup.layout.moe_layers])


def mean_kl(setup: Setup, weights: Substitution, plan: np.ndarray, advance: Callable[[], None]) -> float:
    weights.write(plan)
    kl = [diverge(setup.model, reference).kl for reference in setup.references.values()]
    advance()
    return float(np.concatenate(kl).mean())


def _total(sensitivity: np.ndarray, plan: np.ndarray) -> float:
    return float(sensitivity[np.arange(len(plan)), np.searchsorted(WIDTHS, plan)].sum())


def measure_residual(
    setup: Setup, statistics: Statistics, blocks: Mapping[BlockId, PackedBlock]
) -> dict[str, dict[str, list[float]]]:
    """By projection and transition: held-out R^2 of heads (log, raw and centered log norms) and of column energies."""
    measured = measure_sequences(
        setup.model, setup.found, setup.calibration, statistics, setup.layout, blocks.__getitem__
    )
    log, raw = (fit_residual(measured, setup.layout, feature_transform=kind) for kind in ("log", "raw"))
    centered = fit_residual(measured, setup.layout, centered=True)
    tables = (log.head_r2, raw.head_r2, centered.head_r2, log.energy_r2)
    return {
        projection.label: {
            f"{WIDTHS[high]}->{WIDTHS[low]}": [round(float(r2[projection, high, low]), 3) for r2 in tables]
            for high in range(1, len(WIDTHS))
            for low in range(high)
        }
        for projection in Projection
    }


def random_plans(layout: Layout, count: int, mean_bits: float, seed: int) -> list[np.ndarray]:
    """Plans of independent uniform widths, then moved row by row to within 1 % of equal code bytes."""
    rng = np.random.default_rng(seed)
    target = code_bytes(layout, np.ones(layout.rows, dtype=np.int64)) * mean_bits
    return [_balanced(layout, rng.choice(WIDTHS, layout.rows), target, rng) for _ in range(count)]


def _balanced(layout: Layout, bits: np.ndarray, target: float, rng: np.random.Generator) -> np.ndarray:
    while abs(code_bytes(layout, bits) / target - 1) > 0.01:
        step = 1 if code_bytes(layout, bits) < target else -1
        movable = np.flatnonzero((bits + step >= WIDTHS[0]) & (bits + step <= WIDTHS[-1]))
        bits[rng.choice(movable)] += step
    return bits


def damage_lines(damage: Mapping[str, dict[str, Any]]) -> list[str]:
    """Markdown of measure_damage by method."""
    lines = ["", "| predicted damage | method | single blocks | plans at equal code bytes |", "|" + " --- |" * 4]
    for method, found in damage.items():
        for form in (*FORMS, GAINS, LIVE):
            ranks = [spearmanr(found[what][form], found[what]["measured"])[0] for what in ("blocks", "plans")]
            lines += [f"| {form} | {method} | {ranks[0]:.3f} | {ranks[1]:.3f} |"]
        counts = [len(found[what]["measured"]) for what in ("blocks", "plans")]
    lines += ["", f"Rank correlation with measured KL: {counts[0]} blocks alone at {SINGLE_BLOCK_BITS} bits,"]
    lines += [f"{counts[1]} random plans within 1 % of {PLAN_MEAN_BITS} mean code bits."]
    for method, found in damage.items():
        lines += ["", f"Held-out R^2 of the log residual, {method}:", ""]
        lines += [
            "| projection | transition | heads, log norms | heads, raw norms | heads, centered log norms | energies |"
        ]
        lines += ["|" + " --- |" * 6]
        for projection, transitions in found["residual"].items():
            lines += [f"| {projection} | {t} | " + " | ".join(map(str, r2)) + " |" for t, r2 in transitions.items()]
    return lines
