"""Token grouping and routing statistics on the device against their twins."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.kernels.reference import group_pairs, routing_reference
from pagedweight.kernels.routing import launch_group, launch_routing
from pagedweight.layout import RoutingStats
from tests.support import DEVICE

routings = st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))


def draw_ids(tokens, per_token, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, experts + 2, (tokens, per_token), generator=generator).to(DEVICE)


@given(routings, st.sampled_from([16, 32]))
def test_grouping_is_the_twins(routing, block_m):
    ids = draw_ids(*routing)
    experts = routing[2]
    pairs = group_pairs(ids, experts)
    grouping = launch_group(ids, experts, block_m)
    sizes = (grouping.last - grouping.first).tolist()
    assert sizes == pairs.counts
    assert grouping.pairs[: sum(sizes)].tolist() == pairs.order.tolist()


@given(routings, st.sampled_from([16, 32]))
def test_tiles_cover_every_pair_once(routing, block_m):
    ids = draw_ids(*routing)
    experts = routing[2]
    grouping = launch_group(ids, experts, block_m)
    last, covered = grouping.last.tolist(), []
    for expert, first in zip(grouping.tile_expert.tolist(), grouping.tile_first.tolist(), strict=True):
        assert -1 <= expert < experts
        if expert >= 0:
            tile = range(first, min(first + block_m, last[expert]))
            assert tile, "a used tile is not empty"
            covered += [(pair, expert) for pair in grouping.pairs[tile.start : tile.stop].tolist()]
    assert covered == [(pair, ids.flatten()[pair].item()) for pair, _ in covered]
    assert [pair for pair, _ in covered] == group_pairs(ids, experts).order.tolist()


@given(routings)
def test_statistics_are_the_twins(routing):
    ids = draw_ids(*routing)
    tokens, per_token, experts, seed = routing
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(tokens, per_token, generator=generator)
    norms = torch.rand(tokens, generator=generator)
    squares = torch.rand(tokens * per_token, 3, generator=generator)
    weights[0, 0], norms[-1], squares[-1] = float("nan"), float("inf"), float("nan")
    slot = torch.randint(-1, 2, (tokens,), generator=generator, dtype=torch.int32)
    weights, norms, squares, slot = (tensor.to(DEVICE) for tensor in (weights, norms, squares, slot))
    begun = RoutingStats.zeros(2, 2, experts, DEVICE)
    for tensor in begun:
        tensor.fill_(1)
    expected = RoutingStats(*(tensor.clone() for tensor in begun))
    launch_routing(weights, slot, launch_group(ids, experts, 16), norms, squares, begun, layer_index=1)
    down_norms = squares.sum(1).sqrt().view(tokens, per_token)
    routing_reference(ids, weights, slot, norms, down_norms, expected, layer_index=1)
    for actual, wanted in zip(begun, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
