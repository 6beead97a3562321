"""How well predicted damage ranks single linear-blocks and whole plans, and what residual predictors explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.quality_judge import Answers, Judge, take_answers
from bench.quality_parts import WIDTHS, Trained, code_bytes, rounded
from pagedweight.calibration.divergence import take_reference
from pagedweight.calibration.gains import measure_gains, with_gains
from pagedweight.calibration.residual import fit_residual
from pagedweight.calibration.sensitivity import FORMS, measure_sensitivity
from pagedweight.calibration.sequences import measure_sequences, observe_sequences
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.substitution import substituted
from pagedweight.calibration.text import Windows
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection

PLAN_MEAN_BITS = 3.5
SINGLE_BLOCK_BITS = 3
GAIN_WINDOWS = 8
RESIDUAL_WINDOWS = 64
GAINS = "quadratic, measured layer gains"
LIVE = "quadratic, measured layer gains, the text's own routing mass"
PREDICTIONS = (*FORMS, GAINS, LIVE)
RESIDUALS = ("heads, log norms", "heads, raw norms", "heads, centered log norms", "energies")


def measure_damage(
    trained: Trained,
    statistics: Statistics,
    blocks: Mapping[BlockId, PackedBlock],
    judge: Judge,
    rows: int,
    plans: int,
    windows: int,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Predicted and measured divergence of every block alone and of random plans, and held-out R^2 of residuals."""
    layout = trained.layout
    few = {name: text.first(windows) for name, text in trained.texts.items()}
    answers = [take_answers(trained.model, text, rows=rows) for text in few.values()]
    predictions = _predict(trained, statistics, blocks, few)
    alone = np.full((layout.rows, layout.rows), len(WIDTHS))
    np.fill_diagonal(alone, WIDTHS.index(SINGLE_BLOCK_BITS))
    drawn = np.searchsorted(WIDTHS, random_plans(layout, plans, PLAN_MEAN_BITS, seed=0))
    singles = _mean_kls(judge, answers, alone, advance)
    planned = _mean_kls(judge, answers, np.array(drawn), advance)
    own = np.arange(layout.rows)
    return {
        "plans": {"measured": planned} | {k: s[own, drawn].sum(1).tolist() for k, s in predictions.items()},
        "blocks": {"measured": singles}
        | {k: s[:, WIDTHS.index(SINGLE_BLOCK_BITS)].tolist() for k, s in predictions.items()},
        "residual": _measure_residual(trained, statistics, blocks),
    }


def _predict(
    trained: Trained,
    statistics: Statistics,
    blocks: Mapping[BlockId, PackedBlock],
    texts: Mapping[str, Windows],
) -> dict[str, np.ndarray]:
    """s_i^b (R, W) by form, with gains measured on calibration text, and for the routing of the text it is tried on."""
    layout, modules = trained.layout, [experts.module for experts in trained.found]
    forms = {form: measure_sensitivity(layout, modules, statistics, blocks.__getitem__, form=form) for form in FORMS}
    reference = take_reference(trained.model, trained.calibration.first(GAIN_WINDOWS), rows=GAIN_WINDOWS)
    with substituted(trained.found, layout, blocks.__getitem__) as weights:
        gains = measure_gains(trained.model, reference, layout, forms["quadratic"], weights)
    forms[GAINS] = with_gains(forms["quadratic"], layout, gains)
    live = np.mean([live_mass(trained, windows) for windows in texts.values()], axis=0)
    predictions = {name: table.s_bar * table.m_cal[:, None] for name, table in forms.items()}
    return predictions | {LIVE: forms[GAINS].s_bar * live[:, None]}


def live_mass(trained: Trained, windows: Windows) -> np.ndarray:
    """(R,) routing mass of each row's expert on some windows, Eq. (1)."""
    layout = trained.layout
    mass = observe_sequences(trained.model, trained.found, windows, layout).mass.sum(1)
    first = [layout.first_row(index) for index in range(len(layout.moe_layers))]
    totals = np.add.reduceat(mass, first) / 2  # every expert has two rows
    return mass / np.repeat(totals, [2 * shape.experts for shape in layout.moe_layers])


def _mean_kls(judge: Judge, answers: list[Answers], plans: np.ndarray, advance: Callable[[], None]) -> list[float]:
    """Mean KL of each plan, (n, R), over all windows; as many plans at once as a forward has room for."""
    windows = len(answers[0].tokens)
    together = max(1, answers[0].rows // windows)
    means = []
    for first in range(0, len(plans), together):
        chosen = plans[first : first + together]
        repeated = [given.repeated(len(chosen)) for given in answers]
        kl = [judge.figures(given, chosen.repeat(windows, axis=0)).kl for given in repeated]
        means.extend(np.mean([own.reshape(len(chosen), windows).mean(1) for own in kl], axis=0))
        for _ in chosen:
            advance()
    return rounded(np.array(means))


def _measure_residual(
    trained: Trained, statistics: Statistics, blocks: Mapping[BlockId, PackedBlock]
) -> dict[str, dict[str, list[float]]]:
    """By projection and transition: held-out R^2 of each of RESIDUALS."""
    few = trained.calibration.first(RESIDUAL_WINDOWS)
    measured = measure_sequences(trained.model, trained.found, few, statistics, trained.layout, blocks.__getitem__)
    log, raw = (fit_residual(measured, trained.layout, feature_transform=kind) for kind in ("log", "raw"))
    centered = fit_residual(measured, trained.layout, centered=True)
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
