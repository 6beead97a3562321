"""Gains, the search and calibrate() as a whole, on a tiny random model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import pagedweight
from pagedweight.calibration.divergence import diverge, take_reference
from pagedweight.calibration.gains import measure_gains, with_gains
from pagedweight.calibration.pipeline import Options, calibrate, calibrate_model
from pagedweight.calibration.search import table_at_parent
from pagedweight.calibration.sensitivity import Sensitivity
from pagedweight.calibration.substitution import substituted
from pagedweight.calibration.text import Windows
from pagedweight.checkpoint import Checkpoint
from pagedweight.discovery import find_experts
from pagedweight.policy import Policy
from tests.calibration.support import WIDTHS, batch, blocks_of, layout_of, statistics_of
from tests.hf_models import mixtral_m8, tokens

OPTIONS = Options(rows=4, gain_windows=4, residual_windows=8, search_windows=2)
pytestmark = pytest.mark.filterwarnings("ignore:.*experts saw too few:UserWarning")


def windows(rows: int = 8, length: int = 24) -> Windows:
    return Windows(tokens(rows, length), torch.ones(rows, length, dtype=torch.bool), 0)


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_substituted_weights_come_back() -> None:
    model = mixtral_m8()
    before, packed, layout = weights_of(model), blocks_of(model), layout_of(model)
    reference = take_reference(model, windows(2))

    def change_and_fail() -> None:
        with substituted(find_experts(model), layout, packed.__getitem__) as substitution:
            divergence = []
            for bits in WIDTHS:
                substitution.write(np.full(layout.rows, bits))
                divergence.append(diverge(model, reference).kl.mean())
            assert divergence[0] > divergence[1] > divergence[2] > 0
            substitution.write(np.where(np.arange(layout.rows) == 3, 2, 0))
            assert sum(not torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True)) == 1
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        change_and_fail()
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))


def test_gains_make_layers_add_up_to_what_is_measured() -> None:
    model = mixtral_m8()
    packed, layout = blocks_of(model), layout_of(model)
    rng = np.random.default_rng(0)
    guess = Sensitivity(rng.uniform(1e-4, 2e-4, (layout.rows, len(WIDTHS))), np.full(layout.rows, 1 / 8), {})
    reference = take_reference(model, windows(4))
    with substituted(find_experts(model), layout, packed.__getitem__) as substitution:
        gains = measure_gains(model, reference, layout, guess, substitution)
        scaled = with_gains(guess, layout, gains)
        plan = np.zeros(layout.rows, dtype=np.int64)
        rows = np.arange(17, 32, 2)  # layer 1, down
        plan[rows] = 3
        substitution.write(plan)
        kl = diverge(model, reference).kl.mean()
    assert gains.shape == (2, 2, 3)
    assert (scaled.s_bar * scaled.m_cal[:, None])[rows, 1].sum() == pytest.approx(kl, rel=1e-6)


def test_a_16_bit_models_gain_is_of_damage_beyond_its_rounding_however_little_was_predicted() -> None:
    """bf16's rounding of everything after a changed weight looked like eight times the damage at 5 and 6 bits."""
    model = mixtral_m8().to(torch.bfloat16)
    packed, layout = blocks_of(mixtral_m8()), layout_of(model)
    guess = Sensitivity(np.full((layout.rows, len(WIDTHS)), 5e-4), np.full(layout.rows, 1 / 8), {})
    reference = take_reference(model, windows(4))
    with substituted(find_experts(model), layout, packed.__getitem__) as substitution:
        gains = measure_gains(model, reference, layout, guess, substitution)
    assert (gains[0, :, :2] > 2).all()  # 1.5e-3 nats and more where 5e-4 were predicted
    np.testing.assert_array_equal(gains[0, :, 2], gains[0, :, 1])  # 7e-4
    np.testing.assert_array_equal(gains[1, 1], 1)  # 7e-4 even at the lowest width


def test_the_table_at_parent_has_the_runtimes_bytes() -> None:
    layout = layout_of(mixtral_m8())
    table = table_at_parent(layout)
    assert (table.committed == 4).all()
    assert (np.diff(table.bytes, axis=1) > 0).all()
    assert table.layer.tolist() == [0] * 16 + [1] * 16
    assert table.expert.tolist()[:4] == [0, 0, 1, 1]
    assert table.projection.tolist()[:4] == [0, 1, 0, 1]


def test_a_model_is_calibrated_and_left_as_it_was() -> None:
    model = mixtral_m8()
    before, steps = weights_of(model), {}
    packed, layout = blocks_of(model), layout_of(model)

    def run() -> object:
        return calibrate_model(
            model,
            layout,
            packed.__getitem__,
            windows(),
            OPTIONS,
            lambda step, done, total: steps.update({step: (done, total)}),
        )

    result, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
    result.policy.check_layout(layout)
    assert all(done == total for done, total in steps.values())
    assert list(steps) == ["statistics", "gains", "prompt residual", "policy search"]
    assert result.trials[0].score == 1
    kept = [trial.score for trial in result.trials if trial.kept]
    assert kept == sorted(kept, reverse=True)
    for array in ("s_bar", "m_cal", "multipliers", "head_weights"):
        np.testing.assert_array_equal(getattr(result.policy, array), getattr(again.policy, array))
    json.dumps(result.report())


def test_a_checkpoint_gets_its_policy(tmp_path) -> None:
    model = mixtral_m8()
    pagedweight.quantize(model, tmp_path / "q", widths=WIDTHS)
    policy = calibrate(tmp_path / "q", windows(), options=OPTIONS._replace(search_windows=0))
    stored = Policy.load(tmp_path / "q" / "pagedweight")
    np.testing.assert_array_equal(policy.s_bar, stored.s_bar)
    # The parent width stands in for the unquantized model, so nothing is lost at it.
    assert (policy.s_bar[:, -1] < 1e-6 * policy.s_bar[:, 0]).all()
    report = json.loads((tmp_path / "q" / "pagedweight" / "calibration.json").read_text())
    assert report["tokens"] == 8 * 24
    loaded = pagedweight.load(tmp_path / "q")
    assert loaded.pagedweight.policy.m_cal.tolist() == policy.m_cal.tolist()


def test_calibration_reads_a_linear_block_once_though_it_asks_for_it_all_the_time(tmp_path, monkeypatch) -> None:
    pagedweight.quantize(mixtral_m8(), tmp_path / "q", widths=WIDTHS)
    read, block = [], Checkpoint.block
    monkeypatch.setattr(Checkpoint, "block", lambda opened, one: (read.append(one), block(opened, one))[1])
    calibrate(tmp_path / "q", windows(), model=mixtral_m8(), options=OPTIONS._replace(search_windows=0))
    assert sorted(read) == list(Checkpoint.open(tmp_path / "q").layout.blocks())


def test_case_29_empty_text_is_refused_before_the_model_loads(tmp_path) -> None:
    model = mixtral_m8()
    pagedweight.quantize(model, tmp_path / "q", widths=WIDTHS)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="holds no text"):
        calibrate(tmp_path / "q", tmp_path / "empty.txt", model=tmp_path / "nowhere", tokenizer=object())


def test_another_models_checkpoint_is_refused() -> None:
    model, other = mixtral_m8(), mixtral_m8(num_local_experts=4)
    with pytest.raises(ValueError, match="has other experts than the checkpoint"):
        calibrate_model(other, layout_of(model), blocks_of(model).__getitem__, windows(), OPTIONS)


def test_case_31_a_rank_that_holds_part_of_the_experts_is_refused() -> None:
    """Never a file with half of the experts: each rank would measure its own only."""
    model = mixtral_m8()
    layout, blocks = layout_of(model), blocks_of(model)
    for experts in find_experts(model):
        experts.module._is_expert_parallel = True
    with pytest.raises(ValueError, match="split over expert-parallel ranks; load the model without"):
        calibrate_model(model, layout, blocks.__getitem__, windows(), OPTIONS)


def test_statistics_of_another_model_are_refused_before_a_model_is_loaded(tmp_path) -> None:
    pagedweight.quantize(mixtral_m8(num_local_experts=3), tmp_path / "paged", widths=(2, 3))
    other = statistics_of(mixtral_m8(num_local_experts=4), batch(2, 8))
    with pytest.raises(ValueError, match="the statistics are of 2 layers of other experts"):
        calibrate(tmp_path / "paged", windows(), statistics=other, model=tmp_path / "no model")
