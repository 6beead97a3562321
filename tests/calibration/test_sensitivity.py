"""Importance and Eq. (2): literal where tokens are many, shared and flagged where they are few, never NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedweight
from pagedweight.calibration.importance import BlockImportance, cold_blocks, layer_importance, routing_mass
from pagedweight.calibration.sensitivity import Sensitivity, measure_sensitivity
from pagedweight.calibration.statistics import LayerSums, Statistics
from pagedweight.layout import BlockId, MoeLayer, Projection
from tests.calibration.support import (
    WIDTHS,
    among,
    batch,
    blocks_of,
    error_of,
    layout_of,
    modules_of,
    route,
    statistics_of,
)
from tests.hf_models import mixtral_m8

pytestmark = pytest.mark.filterwarnings("ignore:.*experts saw too few:UserWarning")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return mixtral_m8()


@pytest.fixture(scope="module")
def packed(model: torch.nn.Module) -> dict:
    return blocks_of(model)


def measured(model, packed, statistics: Statistics, form: str = "quadratic") -> Sensitivity:
    modules = modules_of(model)
    return measure_sensitivity(layout_of(model), modules, statistics, packed.__getitem__, form=form)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any), st.integers(0, 5), st.booleans())
def test_importance_is_finite_for_any_coverage(tokens_by_expert: list[int], seed: int, pooled: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.nn.Module()
    experts.down_proj = torch.nn.Parameter(torch.zeros(4, 5, 3))
    statistics = Statistics.zeros([MoeLayer(0, 4, 5, 3)], [experts])
    if pooled:
        statistics.layers = (LayerSums.zeros(MoeLayer(0, 4, 5, 3), torch.device("cpu"), 8, own_moment_bytes=0),)
    layer = statistics.layers[0]
    assert len(layer.blocks[0].moment) == (1 if pooled else 4)
    for expert, count in enumerate(tokens_by_expert):
        layer.mass[expert], layer.counts[expert] = 0.25 * count, count
        for projection, (n, k) in enumerate([(6, 5), (5, 3)]):
            x = torch.randn(count, k, generator=generator)
            layer.blocks[projection].add(expert, x, torch.randn(count, n, generator=generator).square())
    statistics.tokens = sum(tokens_by_expert)
    assert routing_mass(layer).sum().item() == pytest.approx(1)
    assert (routing_mass(layer) > 0).all()
    for importance in layer_importance(statistics, 0):
        assert (importance.stake > 0).all()
        for expert in range(4):
            moment = importance.second_moment(expert)
            torch.testing.assert_close(moment, moment.T)
            torch.testing.assert_close(moment.diagonal(), importance.columns[expert])
            assert torch.linalg.eigvalsh(moment.double()).min() > -1e-6
        for profile in (importance.rows, importance.columns):
            torch.testing.assert_close(profile.sum(1), torch.ones(4))
            assert (profile >= 0).all()


def test_equation_2_is_literal_where_tokens_are_many(model, packed) -> None:
    """With shrinkage out of the way, s is half the sum of F_ij (W - W_b)_ij^2 per token, F by its marginals."""
    statistics = statistics_of(model, batch(8, 64))
    for layer in statistics.layers:
        layer.counts.mul_(10**9)
    table = measured(model, packed, statistics, "diagonal")
    s = table.s_bar * table.m_cal[:, None]
    for block in (BlockId(0, 3, Projection.GATE_UP), BlockId(1, 5, Projection.DOWN)):
        sums = statistics.layers[block.layer].blocks[block.projection]
        fisher = torch.outer(sums.rows[block.expert], sums.columns[block.expert]) / sums.total[block.expert]
        for w, bits in enumerate(WIDTHS):
            expected = 0.5 * (fisher * error_of(model, block, packed[block], bits).double() ** 2).sum() / 512
            assert s[layout_of(model).row(block), w] == pytest.approx(expected.item(), rel=1e-4)


def test_second_moments_are_the_experts_own_where_tokens_are_many(model) -> None:
    statistics = statistics_of(model, batch(4, 32))
    for layer in statistics.layers:
        layer.counts.mul_(10**9)
    for projection in Projection:
        sums = statistics.layers[0].blocks[projection]
        moment = layer_importance(statistics, 0)[projection].second_moment(3)
        torch.testing.assert_close(moment, sums.moment[3] / sums.total[3].float(), rtol=1e-3, atol=1e-7)


def test_forms_agree_where_inputs_are_uncorrelated(model, packed) -> None:
    statistics = statistics_of(model, batch(2, 16))
    for layer in statistics.layers:
        for block in layer.blocks:
            block.moment.copy_(torch.diag_embed(block.moment.diagonal(dim1=1, dim2=2)))
    forms = [measured(model, packed, statistics, form).s_bar for form in ("diagonal", "quadratic")]
    np.testing.assert_allclose(*forms, rtol=1e-3)


def test_the_table_is_a_policy(model, packed) -> None:
    statistics = statistics_of(model, batch(4, 32))
    table = measured(model, packed, statistics)
    policy = table.policy(layout_of(model))
    assert (np.diff(policy.sensitivity, axis=1) < 0).all()  # every bit more is worth something
    shares = policy.m_cal.reshape(2, 8, 2)
    np.testing.assert_allclose(shares[:, :, 0].sum(1), 1)
    np.testing.assert_array_equal(shares[:, :, 0], shares[:, :, 1])


@pytest.mark.parametrize("method", ["gradient", "forward"])
def test_case_17_one_token_is_enough_to_finish(model, packed, method: str) -> None:
    statistics = statistics_of(model, batch(1, 1), method=method)
    with pytest.warns(UserWarning, match="16 experts saw too few"):
        table = measured(model, packed, statistics)
    assert np.isfinite(table.s_bar).all()
    assert (table.s_bar > 0).all()
    unseen = [block for block, count in table.cold.items() if count == 0]
    assert len(unseen) == 2 * 6 * 2
    table.policy(layout_of(model))


def test_case_24_one_unseen_expert_leaves_the_others_alone() -> None:
    model = mixtral_m8()
    route(model, among(list(range(7)), 2))
    packed, statistics = blocks_of(model), statistics_of(model, batch(4, 56))
    with pytest.warns(UserWarning, match=r"2 experts saw too few.*layers\.0\.experts\.7, layers\.1\.experts\.7"):
        table = measured(model, packed, statistics)
    assert set(table.cold) == {BlockId(layer, 7, projection) for layer in (0, 1) for projection in Projection}
    own, shared = layer_importance(statistics, 1)[0].columns[0], layer_importance(statistics, 1)[0].columns[7]
    assert not torch.allclose(own, shared)
    pooled = statistics.layers[1].blocks[0].columns.sum(0)
    torch.testing.assert_close(shared, (pooled / pooled.sum()).float())


def test_case_16_quantizing_twice_gives_the_same_files(tmp_path) -> None:
    """Experts that no token reaches are quantized too, and named; nothing depends on the run."""
    model = mixtral_m8()
    route(model, among([0, 1, 2, 3, 4], 2))
    for name in ("a", "b"):
        statistics = statistics_of(model, batch(1, 64))
        pagedweight.quantize(model, tmp_path / name, widths=WIDTHS, importance=BlockImportance(statistics))
    assert {block.expert for block, count in cold_blocks(statistics).items() if count == 0} == {5, 6, 7}
    files = sorted(path.name for path in (tmp_path / "a" / "pagedweight").iterdir())
    assert len(files) >= 3
    for name in files:
        pages = [(tmp_path / run / "pagedweight" / name).read_bytes() for run in ("a", "b")]
        assert pages[0] == pages[1], name


def test_importance_by_block_gives_equation_2(model, packed) -> None:
    statistics = statistics_of(model, batch(2, 16))
    table = measured(model, packed, statistics, "diagonal")
    importance = BlockImportance(statistics)
    assert len(importance) == len(list(importance)) == 32
    for block in (BlockId(0, 2, Projection.DOWN), BlockId(1, 7, Projection.GATE_UP)):
        row = layout_of(model).row(block)
        expected = (importance[block].double() * error_of(model, block, packed[block], 3).double() ** 2).sum().item()
        assert table.s_bar[row, 1] * table.m_cal[row] == pytest.approx(expected, rel=1e-4)


def test_methods_agree_on_what_matters() -> None:
    """The forward-only fallback ranks blocks as gradients do, in the same unit."""
    model = mixtral_m8(num_hidden_layers=3)
    packed, given = blocks_of(model), batch(8, 32)
    gradient, forward = (
        measured(model, packed, statistics_of(model, given, method=method)) for method in ("gradient", "forward")
    )
    a, b = (np.log(t.s_bar * t.m_cal[:, None])[:, 0] for t in (gradient, forward))
    assert np.corrcoef(a, b)[0, 1] > 0.8
    # After the last layer nothing routes any more; before it, noise also flips later routers, which no gradient sees.
    assert abs(np.mean((a - b)[-16:])) < 0.2


def test_an_unknown_form_is_refused(model, packed) -> None:
    with pytest.raises(ValueError, match="quadratic or diagonal"):
        measured(model, packed, statistics_of(model, batch(1, 4)), "cubic")
