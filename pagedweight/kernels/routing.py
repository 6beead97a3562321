"""Token grouping and routing statistics on the device: no host sync, no shape that depends on data."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from pagedweight.layout import RoutingStats


class Grouping(NamedTuple):
    """The pairs of a batch by expert, in tiles of block_m pairs; pair p is choice p % A of token p // A.

    pairs: int32 (T * A,), valid pairs by expert, then in order; the end is unwritten when ids are out of range.
    first, last: int32 (E,), each expert's half-open range in `pairs`.
    tile_expert: int32 (tiles,), the expert of a tile, -1 when unused.
    tile_first: int32 (tiles,), where in `pairs` a tile begins.
    """

    pairs: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    tile_expert: torch.Tensor
    tile_first: torch.Tensor


# Sizes that change from batch to batch must not compile a kernel each.
@triton.jit(do_not_specialize=["n_pairs", "tiles"])
def _group_kernel(
    ids_ptr,
    pairs_ptr,
    first_ptr,
    last_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    n_pairs,
    per_token,
    tiles,
    stride_it,
    stride_ia,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one expert. Grid (E,). Counts its pairs and those of lower experts, then writes its own range.

    Tiles of expert e begin at (pairs of lower experts) // BLOCK_M + e: far enough for all tiles below it, and known
    without the counts of each.
    """
    expert = tl.program_id(0)
    experts = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    lower = 0
    own = 0
    for start in range(0, n_pairs, BLOCK):
        pair = start + lane
        token = (pair // per_token).to(tl.int64)
        ids_at = ids_ptr + token * stride_it + (pair % per_token) * stride_ia
        ids = tl.load(ids_at, mask=pair < n_pairs, other=-1)
        lower += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), 0)
        own += tl.sum((ids == expert).to(tl.int32), 0)
    tl.store(first_ptr + expert, lower)
    tl.store(last_ptr + expert, lower + own)

    placed = lower
    for start in range(0, n_pairs, BLOCK):
        pair = start + lane
        token = (pair // per_token).to(tl.int64)
        ids_at = ids_ptr + token * stride_it + (pair % per_token) * stride_ia
        mine = tl.load(ids_at, mask=pair < n_pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + placed + rank, pair, mask=mine)
        placed += tl.sum(mine.to(tl.int32), 0)

    tile_start = lower // BLOCK_M + expert
    tile_end = tl.where(expert == experts - 1, tiles, (lower + own) // BLOCK_M + expert + 1)
    for start in range(tile_start, tile_end, BLOCK):
        tile = start + lane
        begins = (tile - tile_start) * BLOCK_M
        tl.store(tile_expert_ptr + tile, tl.where(begins < own, expert, -1), mask=tile < tile_end)
        tl.store(tile_first_ptr + tile, lower + begins, mask=tile < tile_end)


@triton.jit
def _is_finite(value):
    return (value == value) & (tl.abs(value) != float("inf"))


@triton.jit(do_not_specialize=["layer_index", "layers"])
def _routing_kernel(
    weights_ptr,
    slot_ptr,
    pairs_ptr,
    first_ptr,
    last_ptr,
    norms_ptr,
    squares_ptr,
    mass_ptr,
    counts_ptr,
    features_ptr,
    per_token,
    layer_index,
    layers,
    square_tiles,
    stride_wt,
    stride_wa,
    BLOCK: tl.constexpr,
    SQUARE_TILES: tl.constexpr,
):
    """One program: one expert, one request slot; it alone writes their entries. Grid (E, R_s).

    Adds sum r, the count and sum r |x|, sum r |x|^2, max |x| for gate_up inputs (norms_ptr, by token) and down inputs
    (squares_ptr, partial sums of squares [pair, tile]).
    """
    expert = tl.program_id(0)
    slot = tl.program_id(1)
    first = tl.load(first_ptr + expert)
    last = tl.load(last_ptr + expert)
    if first == last:
        return
    lane = tl.arange(0, BLOCK)
    tile = tl.arange(0, SQUARE_TILES)
    mass = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    up_sum = tl.zeros((BLOCK,), tl.float32)
    up_square = tl.zeros((BLOCK,), tl.float32)
    up_max = tl.zeros((BLOCK,), tl.float32)
    down_sum = tl.zeros((BLOCK,), tl.float32)
    down_square = tl.zeros((BLOCK,), tl.float32)
    down_max = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        inside = start + lane < last
        pair = tl.load(pairs_ptr + start + lane, mask=inside, other=0)
        token = (pair // per_token).to(tl.int64)
        choice = pair % per_token
        counted = inside & (tl.load(slot_ptr + token, mask=inside, other=-1) == slot)
        weight = tl.load(weights_ptr + token * stride_wt + choice * stride_wa, mask=counted, other=0.0).to(tl.float32)
        counted = counted & _is_finite(weight)
        weight = tl.where(counted, weight, 0.0)
        norm = tl.load(norms_ptr + token, mask=counted, other=0.0)
        norm = tl.where(_is_finite(norm * norm), norm, 0.0)
        squares_at = squares_ptr + pair.to(tl.int64)[:, None] * square_tiles + tile[None, :]
        squares = tl.load(squares_at, mask=counted[:, None] & (tile < square_tiles)[None, :], other=0.0)
        square = tl.sum(squares, 1)
        square = tl.where(_is_finite(square), square, 0.0)
        down_norm = tl.sqrt(square)
        mass += weight
        count += counted.to(tl.int32)
        up_sum += weight * norm
        up_square += weight * norm * norm
        up_max = tl.maximum(up_max, norm)
        down_sum += weight * down_norm
        down_square += weight * square
        down_max = tl.maximum(down_max, down_norm)

    entry = (slot * layers + layer_index).to(tl.int64) * tl.num_programs(0) + expert
    tl.store(mass_ptr + entry, tl.load(mass_ptr + entry) + tl.sum(mass, 0))
    tl.store(counts_ptr + entry, tl.load(counts_ptr + entry) + tl.sum(count, 0))
    feature = features_ptr + entry * 6
    tl.store(feature, tl.load(feature) + tl.sum(up_sum, 0))
    tl.store(feature + 1, tl.load(feature + 1) + tl.sum(up_square, 0))
    tl.store(feature + 2, tl.maximum(tl.load(feature + 2), tl.max(up_max, 0)))
    tl.store(feature + 3, tl.load(feature + 3) + tl.sum(down_sum, 0))
    tl.store(feature + 4, tl.load(feature + 4) + tl.sum(down_square, 0))
    tl.store(feature + 5, tl.maximum(tl.load(feature + 5), tl.max(down_max, 0)))


def launch_group(expert_ids: torch.Tensor, experts: int, block_m: int) -> Grouping:
    """Groups the pairs of (T, A) ids by expert; ids outside [0, E) are left out."""
    n_pairs = expert_ids.numel()
    tiles = n_pairs // block_m + experts
    grouping = Grouping(
        *(
            torch.empty(size, dtype=torch.int32, device=expert_ids.device)
            for size in (n_pairs, experts, experts, tiles, tiles)
        )
    )
    _group_kernel[(experts,)](
        ids_ptr=expert_ids,
        pairs_ptr=grouping.pairs,
        first_ptr=grouping.first,
        last_ptr=grouping.last,
        tile_expert_ptr=grouping.tile_expert,
        tile_first_ptr=grouping.tile_first,
        n_pairs=n_pairs,
        per_token=expert_ids.shape[1],
        tiles=tiles,
        stride_it=expert_ids.stride(0),
        stride_ia=expert_ids.stride(1),
        BLOCK_M=block_m,
        BLOCK=1024,
    )
    return grouping


def launch_routing(
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor,
    grouping: Grouping,
    gate_up_norms: torch.Tensor,
    down_squares: torch.Tensor,
    stats: RoutingStats,
    layer_index: int,
) -> None:
    """Adds one batch to the statistics; see routing_reference. down_squares: fp32 (T * A, tiles) partial sums.

    The statistics may hold more experts than were grouped: another layer of the model may have more.
    """
    slots, layers, experts = stats.mass.shape
    grouping = _with_empty_groups(grouping, experts - len(grouping.first))
    _routing_kernel[(experts, slots)](
        weights_ptr=expert_weights,
        slot_ptr=token_slot,
        pairs_ptr=grouping.pairs,
        first_ptr=grouping.first,
        last_ptr=grouping.last,
        norms_ptr=gate_up_norms,
        squares_ptr=down_squares,
        mass_ptr=stats.mass,
        counts_ptr=stats.counts,
        features_ptr=stats.features,
        per_token=expert_weights.shape[1],
        layer_index=layer_index,
        layers=layers,
        square_tiles=down_squares.shape[1],
        stride_wt=expert_weights.stride(0),
        stride_wa=expert_weights.stride(1),
        BLOCK=64,
        SQUARE_TILES=triton.next_power_of_2(down_squares.shape[1]),
    )


def _with_empty_groups(grouping: Grouping, count: int) -> Grouping:
    """The grouping with `count` more experts that got no pair: every program of the statistics reads its range."""
    if not count:
        return grouping
    first, last = (functional.pad(ends, (0, count)) for ends in (grouping.first, grouping.last))
    return grouping._replace(first=first, last=last)
