"""The twins against plain loops, and statistics that one bad token cannot spoil."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.kernels import reference
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.kernels.reference import decode_blocks, group_pairs, routing_reference, to_stored_order
from pagedweight.layout import RoutingStats
from tests.support import assert_close, draw_bits, draw_routing, draw_tokens, make_layer, run_twin, zero_slots

CPU = torch.device("cpu")


@st.composite
def layers(draw):
    low = draw(st.integers(2, 5))
    widths = tuple(range(low, draw(st.integers(low, 8)) + 1))
    return make_layer(
        draw(st.integers(1, 6)),
        draw(st.sampled_from([1, 31, 44, 64, 90, 500, 600])),
        draw(st.sampled_from([1, 22, 33, 64, 130])),
        widths,
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        seed=draw(st.integers(0, 99)),
        first_row=draw(st.sampled_from([0, 4])),
    )


@given(layers(), st.integers(0, 9), st.integers(0, 99), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_twin_is_the_definition(layer, tokens, seed, dtype):
    ids, weights = draw_routing(tokens, layer.shape.experts, min(3, layer.shape.experts), seed)
    x = draw_tokens(tokens, layer.shape.hidden, seed, dtype)
    bits = draw_bits(layer, seed)
    out = run_twin(layer, layer.place(bits, device=CPU), x, ids, weights).out
    assert out.dtype == dtype
    assert_close(out, layer.moe(x, ids, weights, bits), dtype)


@given(layers(), st.integers(0, 99))
def test_decoding_follows_the_committed_width_of_each_block(layer, seed):
    bits = draw_bits(layer, seed)
    tables = layer.place(bits, seed, padding=1, device=CPU)
    for projection in (0, 1):
        rows = torch.arange(projection, len(bits), 2)
        geometry = plane_geometry(*layer.codes[projection].shape, layer.frame_bytes)
        weights = decode_blocks(tables, layer.first_row + rows, geometry, layer.codebooks)
        probe = to_stored_order(torch.eye(geometry.columns))
        for row, weight in zip(rows.tolist(), weights, strict=True):
            assert torch.equal(weight @ probe.T, layer.weight(row, int(bits[row])).float())


def test_experts_decoded_in_small_chunks_change_nothing(monkeypatch):
    layer = make_layer(5, 64, 48)
    tables = layer.place(draw_bits(layer), device=CPU)
    ids, weights = draw_routing(9, 5, 3)
    x = draw_tokens(9, 64)
    together = run_twin(layer, tables, x, ids, weights).out
    monkeypatch.setattr(reference, "DECODED_WEIGHTS", 1)
    assert torch.equal(run_twin(layer, tables, x, ids, weights).out, together)


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 7), st.integers(0, 99))
def test_pairs_are_grouped_in_order(tokens, per_token, experts, seed):
    ids = torch.randint(-2, experts + 2, (tokens, per_token), generator=torch.Generator().manual_seed(seed))
    pairs = group_pairs(ids, experts)
    flat = ids.flatten().tolist()
    expected = [p for e in range(experts) for p, chosen in enumerate(flat) if chosen == e]
    assert pairs.order.tolist() == expected
    assert pairs.counts == [flat.count(e) for e in range(experts)]


@given(st.integers(0, 12), st.integers(0, 99))
def test_statistics_are_sums_over_routed_tokens(tokens, seed):
    experts, slots, layer_index = 5, 3, 1
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, 2), generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    slot = torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32)
    norms, down_norms = torch.rand(tokens, generator=generator), torch.rand(tokens, 2, generator=generator)
    stats = RoutingStats.zeros(slots, 2, experts)
    routing_reference(ids, weights, slot, norms, down_norms, stats, layer_index)

    expected = RoutingStats.zeros(slots, 2, experts)
    for t in range(tokens):
        for a in range(2):
            s, e, r = int(slot[t]), int(ids[t, a]), float(weights[t, a])
            if s < 0 or not 0 <= e < experts:
                continue
            expected.mass[s, layer_index, e] += r
            expected.counts[s, layer_index, e] += 1
            for u, norm in enumerate((float(norms[t]), float(down_norms[t, a]))):
                entry = expected.features[s, layer_index, e, u]
                entry += torch.tensor([r * norm, r * norm * norm, 0.0])
                entry[2] = max(float(entry[2]), norm)
    for actual, wanted in zip(stats, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_case_40_statistics_stay_finite_beside_bad_tokens():
    stats = RoutingStats.zeros(1, 1, 2)
    weights = torch.tensor([[0.5], [float("nan")], [0.25], [1.0]])
    norms = torch.tensor([1.0, 1.0, float("nan"), 1e30])
    routing_reference(torch.zeros(4, 1, dtype=torch.int64), weights, zero_slots(4), norms, norms[:, None], stats, 0)
    assert stats.mass[0, 0].tolist() == [1.75, 0]
    assert stats.counts[0, 0].tolist() == [3, 0]
    assert stats.features[0, 0, 0].tolist() == [[0.5, 0.5, 1.0]] * 2


@pytest.mark.parametrize("columns", [1, 64, 700])
def test_stored_order_is_zero_at_padding(columns):
    x = torch.ones(2, columns)
    stored = to_stored_order(x)
    assert stored.shape == (2, -(-columns // 64) * 64)
    assert stored.sum(1).tolist() == [columns, columns]
