"""The benches' judge of plans, against the weights written into the model and its own softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.quality_damage import _mean_kls
from bench.quality_judge import Judge, take_answers
from pagedweight.calibration.divergence import diverge, take_reference
from pagedweight.calibration.substitution import substituted
from pagedweight.calibration.text import Windows
from pagedweight.discovery import find_experts
from tests.calibration.support import WIDTHS, blocks_of, layout_of
from tests.hf_models import mixtral_m8, tokens

WINDOWS, LENGTH = 3, 12


@pytest.fixture(scope="module")
def judged():
    model = mixtral_m8().eval()
    model.set_experts_implementation("eager")
    found, layout = find_experts(model), layout_of(model)
    blocks = blocks_of(model)
    windows = Windows(tokens(WINDOWS, LENGTH), torch.ones(WINDOWS, LENGTH, dtype=torch.bool), 0)
    return model, found, layout, blocks, windows


@given(seed=st.integers(0, 2**16))
def test_every_window_is_judged_under_its_own_plan(judged, seed: int) -> None:
    model, found, layout, blocks, windows = judged
    plans = np.random.default_rng(seed).integers(0, len(WIDTHS) + 1, (WINDOWS, layout.rows))
    answers = take_answers(model, windows, rows=2)
    got = Judge(model, found, layout, blocks.__getitem__).figures(answers, plans)
    reference = take_reference(model, windows, rows=1)
    bits = np.append(WIDTHS, 0)[plans]
    with substituted(found, layout, blocks.__getitem__) as weights:
        for window in range(WINDOWS):
            weights.write(bits[window])
            expected = diverge(model, reference)
            assert got.kl[window] == pytest.approx(expected.kl[window], abs=1e-5, rel=1e-3)
            assert got.loss[window] == pytest.approx(expected.loss[window], rel=1e-4)
            assert got.agreement[window] == pytest.approx(expected.agreement[window], abs=1e-6)


def test_the_unquantized_plan_moves_nothing_and_leaves_the_model_alone(judged) -> None:
    model, found, layout, blocks, windows = judged
    answers = take_answers(model, windows, rows=3)
    own = model(input_ids=windows.tokens).logits
    figures = Judge(model, found, layout, blocks.__getitem__).figures(answers, np.full(layout.rows, len(WIDTHS)))
    assert np.abs(figures.kl).max() < 1e-6
    assert (figures.agreement == 1).all()
    assert torch.equal(model(input_ids=windows.tokens).logits, own)


def test_figures_are_of_the_positions_from_first_on(judged) -> None:
    model, found, layout, blocks, windows = judged
    judge, plan = Judge(model, found, layout, blocks.__getitem__), np.zeros(layout.rows, dtype=np.int64)
    whole, late = (judge.figures(take_answers(model, windows, rows=3, first=f), plan).kl for f in (0, LENGTH // 2))
    early = 2 * whole - late
    assert (early > 0).all()
    assert not np.allclose(whole, late)


@pytest.mark.parametrize("rows", [1, 2 * WINDOWS + 1])
def test_plans_that_are_judged_together_do_not_mix(judged, rows: int) -> None:
    model, found, layout, blocks, windows = judged
    judge, answers = Judge(model, found, layout, blocks.__getitem__), [take_answers(model, windows, rows=rows)] * 2
    plans = np.random.default_rng(0).integers(0, len(WIDTHS) + 1, (5, layout.rows))
    done: list[int] = []
    got = _mean_kls(judge, answers, plans, lambda: done.append(1))
    assert len(done) == len(plans)
    assert got == pytest.approx([judge.figures(answers[0], plan).kl.mean() for plan in plans], rel=1e-3)


def test_masked_windows_are_refused(judged) -> None:
    model, *_, windows = judged
    mask = windows.mask.clone()
    mask[0, -1] = False
    with pytest.raises(ValueError, match="not full"):
        take_answers(model, windows._replace(mask=mask), rows=3)
