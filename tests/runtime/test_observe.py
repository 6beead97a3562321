"""Eq. (1), phi of Eq. (5), and their merging over requests, against literal transcriptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.layout import RoutingStats
from pagedweight.runtime.damage import log_residual
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Signals, forecast_blocks, merge_requests, observe
from tests.runtime.planner_support import layout_of, table_of

LAYERS, EXPERTS = 2, 4


def routed(requests: int, seed: int) -> tuple[RoutingStats, list[list[np.ndarray]]]:
    """Statistics of random tokens, and by request and layer the tokens: rows of expert, r and the two input norms."""
    rng = np.random.default_rng(seed)
    stats = RoutingStats.zeros(requests, LAYERS, EXPERTS)
    tokens = []
    for request in range(requests):
        tokens.append([])
        for layer in range(LAYERS):
            experts = rng.permutation(EXPERTS)
            seen = np.stack([experts, *rng.random((3, len(experts))).astype(np.float32)], axis=1)
            for expert, r, *norms in seen:
                stats.mass[request, layer, int(expert)] += r
                for projection, norm in enumerate(norms):
                    sums = stats.features[request, layer, int(expert), projection]
                    sums[0] += r * norm
                    sums[1] += r * norm**2
                    sums[2] = max(float(sums[2]), norm)
            tokens[-1].append(seen)
    return stats, tokens


@given(st.integers(0, 1000))
def test_one_requests_mass_is_equation_1(seed: int) -> None:
    stats, tokens = routed(1, seed)
    mass = merge_requests(stats).mass.numpy()
    for layer in range(LAYERS):
        seen = tokens[0][layer]
        for e in range(EXPERTS):
            m = sum(r for z, r in seen[:, :2] if z == e) / sum(seen[:, 1])
            assert np.isclose(mass[layer, e], m, rtol=1e-5)


@given(st.integers(0, 1000))
def test_features_are_weighted_mean_rms_and_largest_norm(seed: int) -> None:
    stats, tokens = routed(1, seed)
    features = merge_requests(stats).features.numpy()
    for layer in range(LAYERS):
        for expert, _, *norms in tokens[0][layer]:
            for projection, norm in enumerate(norms):
                assert np.allclose(features[layer, int(expert), projection], norm, rtol=1e-3)


@given(st.integers(0, 1000))
def test_requests_are_averaged_by_kv_usage(seed: int) -> None:
    """Masses, residuals, confidence, bounds; a linear head of averaged features is the average of the heads."""
    stats, _ = routed(3, seed)
    kv_blocks, confidence = torch.tensor([5.0, 1.0, 2.0]), torch.tensor([1.0, 0.5, 0.25])
    bounds = torch.tensor([[-1.0, 1.0], [-0.5, 2.0], [0.0, 0.0]])
    merged = merge_requests(stats, kv_blocks, confidence, bounds)
    alone = [merge_requests(RoutingStats(*(t[r : r + 1] for t in stats))) for r in range(3)]
    usage = kv_blocks / kv_blocks.sum()
    assert torch.allclose(merged.mass, sum(w * a.mass for w, a in zip(usage, alone, strict=True)), rtol=1e-5)
    assert torch.allclose(merged.confidence, (usage * confidence).sum().expand(LAYERS, EXPERTS), rtol=1e-5)
    assert torch.allclose(merged.rho_bounds, usage @ bounds, rtol=1e-5)
    w, a = np.array([0.3, -0.2, 0.1]), 0.7
    rho = [log_residual(w, a, np.moveaxis(s.features.double().numpy(), -1, 0)) for s in (merged, *alone)]
    assert np.allclose(rho[0], np.tensordot(usage.double().numpy(), rho[1:], axes=1), rtol=1e-5)


def test_a_request_without_tokens_somewhere_only_lowers_confidence() -> None:
    stats, _ = routed(2, 3)
    stats.mass[1, 0], stats.features[1, 0] = 0.0, 0.0
    merged = merge_requests(stats, torch.tensor([1.0, 3.0]))
    alone = merge_requests(RoutingStats(*(t[:1] for t in stats)))
    assert torch.allclose(merged.mass[0], alone.mass[0])
    assert torch.allclose(merged.features[0], alone.features[0])
    assert torch.allclose(merged.confidence[0], torch.full((EXPERTS,), 0.25))
    assert torch.allclose(merged.confidence[1], torch.ones(EXPERTS))


def test_a_free_slot_counts_for_nothing() -> None:
    stats, _ = routed(2, 4)
    stats.mass[1], stats.features[1] = 0.0, 0.0
    alone = RoutingStats(*(t[:1] for t in stats))
    for got, expected in zip(merge_requests(stats)[:4], merge_requests(alone)[:4], strict=True):
        assert torch.equal(got, expected)


def test_case_44_no_token_at_all_stays_finite() -> None:
    merged = merge_requests(RoutingStats.zeros(2, LAYERS, EXPERTS), torch.zeros(2))
    assert all((t == 0).all() for t in merged[:4])


@pytest.mark.parametrize("log_features", [False, True])
def test_case_40_what_is_not_finite_is_not_seen(log_features: bool) -> None:
    stats, _ = routed(2, 5)
    clean = merge_requests(stats, log_features=log_features)
    stats.features[1, 0, 2, 0, 1] = torch.nan
    stats.mass[1, 1, 3] = torch.inf
    merged = merge_requests(stats, log_features=log_features)
    assert all(torch.isfinite(t).all() for t in merged[:4])
    assert torch.allclose(merged.confidence[0, 2], torch.tensor(0.5))
    assert torch.equal(merged.features[0, :2], clean.features[0, :2])


def test_log_features_are_merged_as_logarithms() -> None:
    stats, _ = routed(1, 6)
    raw, log = merge_requests(stats), merge_requests(stats, log_features=True)
    assert torch.allclose(raw.features.log(), log.features)


def test_rows_get_their_own_experts_signals() -> None:
    layout = layout_of((3, 4), (2, 4))
    table = table_of(layout, np.random.default_rng(0))
    signals = Signals(torch.rand(2, 4), torch.rand(2), torch.rand(2, 4, 2, 3), torch.rand(2, 4))
    seen = observe(table, KVState(5, 7), 2, signals, in_flight_bytes=3)
    assert (seen.kv, seen.threshold_blocks, seen.in_flight_bytes) == (KVState(5, 7), 2, 3)
    for row in range(layout.rows):
        at = table.layer[row], table.expert[row]
        assert np.allclose(seen.features[row], signals.features[at][table.projection[row]])
        assert np.isclose(seen.confidence[row], signals.confidence[at])
    assert np.allclose(seen.routed, signals.routed)
    assert observe(table, KVState(5, 7), 2).mass is None


def test_routed_tokens_say_how_much_a_merged_mass_tells() -> None:
    """One request's own count; as many times that of equal requests; a request that holds little adds little."""
    stats, _ = routed(3, 0)
    stats.counts[:] = torch.tensor([10, 10, 1000])[:, None, None]
    stats.counts[:, 1] = 0
    stats.mass[:, 1] = 0
    for blocks, expected in (([1, 0, 0], 40), ([1, 1, 0], 80), ([2, 0, 1], 1 / (4 / 9 / 40 + 1 / 9 / 4000))):
        merged = merge_requests(stats, torch.tensor(blocks))
        assert np.allclose(merged.routed, [expected, 0], rtol=1e-5)


def test_forecast_counts_whole_blocks() -> None:
    assert forecast_blocks(growth_tokens=33, queued_requests=2, tokens_per_queued=16, block_tokens=16) == 5
    assert forecast_blocks(0, 0, 100, 16) == 0


@pytest.mark.parametrize("value", [-1.0, -torch.inf, torch.inf, torch.nan])
def test_mass_that_is_none_counts_as_none(value: float) -> None:
    merged = []
    for mass in (value, 0.0):
        stats, _ = routed(2, 5)
        stats.mass[0, 0, 1] = mass
        merged.append(merge_requests(stats))
    assert all(torch.equal(spoiled, none) for spoiled, none in zip(*(m[:4] for m in merged), strict=True))
