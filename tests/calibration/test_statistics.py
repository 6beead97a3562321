"""Running sums: additive, bounded, right for one token, and loud when there is nothing to sum."""

from __future__ import annotations

import gc

import pytest
import torch

from pagedweight.calibration.capture import Batch, observe_forward
from pagedweight.calibration.collect import collect
from pagedweight.calibration.statistics import BlockSums, Statistics
from pagedweight.discovery import find_experts
from pagedweight.layout import Projection
from tests.calibration.support import batch, modules_of, route, statistics_of
from tests.hf_models import FAMILIES, mixtral_m8


def sums_of(statistics: Statistics) -> list[torch.Tensor]:
    return [
        tensor
        for layer in statistics.layers
        for tensor in (layer.mass, layer.counts.double(), *(t for b in layer.blocks for t in vars(b).values()))
    ]


@pytest.mark.parametrize("method", ["gradient", "forward"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_observed_in_full(family: str, method: str) -> None:
    model, given = FAMILIES[family](), batch(2, 6, padding=2)
    per_token = {"M8": 2, "Q60": 4, "G16": 8}[family]
    statistics = statistics_of(model, given, method=method)
    assert statistics.tokens == 10
    assert statistics.sequences == 2
    for layer in statistics.layers:
        assert layer.counts.sum() == 10 * per_token
        for block in layer.blocks:
            assert all(t.isfinite().all() for t in (block.columns, block.rows, block.total, block.moment))
            # Two marginals and a trace of one and the same matrix.
            torch.testing.assert_close(block.columns.sum(1), block.total, rtol=1e-4, atol=0)
            torch.testing.assert_close(block.rows.sum(1), block.total, rtol=1e-4, atol=0)
            trace = block.moment.diagonal(dim1=1, dim2=2).sum().double()
            torch.testing.assert_close(trace, block.total.sum(), rtol=1e-4, atol=0)


def test_batches_add_up() -> None:
    model = mixtral_m8()
    a, b = batch(2, 5, seed=1), batch(2, 5, seed=2)
    both = Batch(torch.cat([a.tokens, b.tokens]), torch.cat([a.mask, b.mask]))
    apart, together = statistics_of(model, a, b, labels="text"), statistics_of(model, both, labels="text")
    for one, other in zip(sums_of(apart), sums_of(together), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-9)


def test_a_seed_gives_the_same_sums_again() -> None:
    model = mixtral_m8()
    first, again, other = (statistics_of(model, batch(2, 5), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(sums_of(first), sums_of(again), strict=True))
    assert not torch.equal(first.layers[0].blocks[0].rows, other.layers[0].blocks[0].rows)


def test_case_19_an_expert_with_one_token_keeps_its_shape() -> None:
    model = mixtral_m8()
    choice = torch.tensor([[0, 1]] * 5)
    choice[2] = torch.tensor([3, 1])
    route(model, lambda count: choice)
    given, visits = batch(1, 5), []
    statistics = Statistics.zeros([found.shape for found in find_experts(model)], modules_of(model))
    observe_forward(model, modules_of(model), given, lambda v: (visits.append(v), statistics.observe(v)))
    layer = statistics.layers[0]
    assert layer.counts.tolist() == [4, 5, 0, 1, 0, 0, 0, 0]
    only = next(v for v in visits if v.layer_index == 0 and v.expert == 3)
    for projection, x in ((Projection.GATE_UP, only.gate_up_input), (Projection.DOWN, only.down_input)):
        columns = layer.blocks[projection].columns[3]
        torch.testing.assert_close((columns / columns.sum()).float(), x[0].square() / x[0].square().sum())


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_case_21_every_experts_implementation_is_observed(implementation: str) -> None:
    model, given = mixtral_m8(), batch(2, 8)
    expected = [layer.counts for layer in statistics_of(model, given).layers]
    model.set_experts_implementation(implementation)
    statistics = statistics_of(model, given)
    for layer, counts in zip(statistics.layers, expected, strict=True):
        assert layer.counts.sum() == 16 * 2
        assert torch.equal(layer.counts, counts)


def test_nothing_observed_is_an_error() -> None:
    model = mixtral_m8()
    with pytest.raises(ValueError, match="no sequences"):
        statistics_of(model)
    with pytest.raises(ValueError, match="no routed token in MoE layer 0"):
        statistics_of(model, Batch(batch(1, 4).tokens, torch.zeros(1, 4, dtype=torch.bool)), labels="text")
    with pytest.raises(ValueError, match="method 'magic'"):
        collect(model, find_experts(model), [], method="magic")


def test_what_is_not_finite_is_an_error() -> None:
    model = mixtral_m8()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[:, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="met NaN or infinite"):
        statistics_of(model, batch(1, 4), labels="text")


def test_case_35_memory_does_not_grow_with_samples() -> None:
    model = mixtral_m8()

    def bytes_held(sequences: int) -> int:
        statistics = statistics_of(model, *(batch(1, 8, seed=seed) for seed in range(sequences)))
        gc.collect()
        assert statistics.sequences == sequences
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor)

    assert bytes_held(6) == bytes_held(2)


def test_a_bf16_model_is_summed_in_wide_floats() -> None:
    model = mixtral_m8().to(torch.bfloat16)
    statistics = statistics_of(model, batch(2, 8))
    assert all(t.dtype in (torch.float32, torch.float64) for t in sums_of(statistics))
    sums = BlockSums.zeros(1, 3, 4, 1, torch.device("cpu"))
    sums.add(0, torch.full((1, 4), 16.0), torch.ones(1, 3))
    for _ in range(64):  # each is below half a bf16 unit of the first
        sums.add(0, torch.full((1, 4), 0.5), torch.ones(1, 3))
    torch.testing.assert_close(sums.columns, torch.full((1, 4), 3 * (256 + 64 * 0.25), dtype=torch.float64))
    torch.testing.assert_close(sums.moment[0], torch.full((4, 4), 3 * (256 + 64 * 0.25)))


def test_wide_inputs_keep_no_second_moments() -> None:
    statistics = statistics_of(mixtral_m8(), batch(1, 4), moment_columns=64)
    assert [block.moment is None for block in statistics.layers[0].blocks] == [False, True]
