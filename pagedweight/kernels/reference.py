"""Torch twins of the kernels: the definition of right, and the path on machines without CUDA.

Weights are decoded in the stored column order and the inputs are permuted to it: that moves tokens, not weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch.nn import functional

from pagedweight.bitplane import table_from_bytes, table_values
from pagedweight.kernels.call import Call
from pagedweight.kernels.device_order import BLOCK_WORDS, PlaneGeometry, plane_geometry, stored_columns
from pagedweight.layout import BlockTables, Projection, RoutingStats, table_bytes

GATES = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda value: functional.relu(value).square(),
}
GPT_OSS_ALPHA = 1.702

# Weights decoded at once: small enough for the cache of a laptop, large enough that few steps decode a small model.
DECODED_WEIGHTS = 1 << 22
# Bytes that every allocation on a CPU is aligned to, frames among them.
_ADDRESS_STEP = 64


class Pairs(NamedTuple):
    """The (token, choice) pairs of a batch by expert; pair p is choice p % A of token p // A.

    order: int64, the pairs with an id in [0, E), by expert and then by pair.
    counts: pairs of each expert, E numbers.
    """

    order: torch.Tensor
    counts: list[int]


def group_pairs(expert_ids: torch.Tensor, experts: int) -> Pairs:
    """Groups the pairs of (T, A) ids by expert; ids outside [0, E) are left out."""
    flat = expert_ids.reshape(-1).long()
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.bincount(keys, minlength=experts + 1)[:experts].tolist()
    return Pairs(keys.argsort(stable=True)[: sum(counts)], counts)


@torch.autocast("cpu", enabled=False)  # the twin says itself where it rounds
def fused_moe_reference(call: Call) -> torch.Tensor:
    """out[t] = sum_a w[t, a] * (down_e combine(gate_up_e x[t] + b_e) + c_e), e = expert_ids[t, a], as `fused_moe`."""
    tokens, hidden = call.x.shape
    per_token = call.expert_ids.shape[1]
    tables, books = call.tables, dict(zip(call.widths, call.books, strict=True))
    gate_up_plane = plane_geometry((1 + call.gated) * call.intermediate, hidden, call.frame_bytes)
    down_plane = plane_geometry(hidden, call.intermediate, call.frame_bytes)
    pairs = group_pairs(call.expert_ids, call.experts)

    inputs = call.x.float()
    stored_inputs = to_stored_order(inputs)
    down_norms = inputs.new_zeros(tokens * per_token)
    outputs = inputs.new_zeros(tokens * per_token, hidden)
    for active, groups in _chunks(pairs, gate_up_plane.rows * hidden + down_plane.rows * call.intermediate):
        rows = call.first_row + 2 * torch.tensor(active, device=call.x.device)
        gate_up = decode_blocks(tables, rows + Projection.GATE_UP, gate_up_plane, books)
        down = decode_blocks(tables, rows + Projection.DOWN, down_plane, books)
        for expert, gate_up_weight, down_weight, group in zip(active, gate_up, down, groups, strict=True):
            inputs_here = stored_inputs[group // per_token]
            product = functional.linear(inputs_here, gate_up_weight, _bias_of(call.gate_up_bias, expert))
            inner = combine(product, call.activation, call.gated, call.limit)
            down_norms[group] = inner.norm(dim=-1)
            outputs[group] = functional.linear(to_stored_order(inner), down_weight, _bias_of(call.down_bias, expert))

    chosen = (call.expert_ids >= 0) & (call.expert_ids < call.experts)
    routing_reference(
        torch.where(chosen, call.expert_ids, -1),  # the statistics may hold more experts than this layer has
        call.expert_weights, call.token_slot, inputs.norm(dim=-1), down_norms.view(tokens, per_token), call.stats,
        call.layer_index,
    )  # fmt: skip
    weights = torch.where(chosen, call.expert_weights.float(), 0.0)
    return (outputs.view(tokens, per_token, hidden) * weights[..., None]).sum(1).to(call.x.dtype)


def combine(product: torch.Tensor, activation: str, gated: bool = True, limit: float = 0.0) -> torch.Tensor:
    """(n, I) inputs of down from (n, 2I) gate and up products, gate first, or from (n, I) without a gate.

    With g and u the two: act(g) * u for silu, gelu_tanh and relu2. With u' = u clamped to [-limit, limit]:
    clamped_silu is silu(min(g, limit)) * u', capped_silu min(silu(g), limit) * u', and gpt_oss, with
    g' = min(g, limit), g' * sigmoid(1.702 g') * (u' + 1).
    """
    if not gated:
        return GATES[activation](product)
    gate, up = product.chunk(2, dim=-1)
    if activation in GATES:
        return GATES[activation](gate) * up
    up = up.clamp(-limit, limit)
    if activation == "capped_silu":
        return functional.silu(gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    if activation == "clamped_silu":
        return functional.silu(gate) * up
    return gate * torch.sigmoid(GPT_OSS_ALPHA * gate) * (up + 1)


def _bias_of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert].float()


def routing_reference(
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor,
    gate_up_norms: torch.Tensor,
    down_norms: torch.Tensor,
    stats: RoutingStats,
    layer_index: int,
) -> None:
    """Adds one batch to the statistics of a layer, in place.

    gate_up_norms: (T,) 2-norms of the layer's inputs; down_norms: (T, A) 2-norms of what enters each down projection.
    A pair is counted when its id is in [0, E), its token's slot in [0, R_s) and its weight finite; a norm that is not
    finite adds nothing to the features, so one bad token cannot spoil them for good.
    """
    slots, layers, experts = stats.mass.shape
    weights = expert_weights.float()
    slot = token_slot[:, None].expand_as(expert_ids)
    counted = (expert_ids >= 0) & (expert_ids < experts) & (slot >= 0) & (slot < slots) & weights.isfinite()
    # What is not counted adds zeros to some entry.
    entry = (slot.long() * layers + layer_index) * experts + expert_ids.long()
    entry = torch.where(counted, entry, 0).flatten()
    weight = torch.where(counted, weights, 0.0).flatten()
    norms = torch.stack([gate_up_norms[:, None].expand_as(down_norms), down_norms], dim=-1).float()
    norms = torch.where(counted[..., None] & norms.square().isfinite(), norms, 0.0).flatten(0, 1)

    stats.mass.view(-1).index_add_(0, entry, weight)
    stats.counts.view(-1).index_add_(0, entry, counted.flatten().to(stats.counts.dtype))
    features = stats.features.view(-1, 2, 3)
    sums = torch.stack([norms, norms.square()], dim=-1) * weight[:, None, None]
    features[..., :2].index_add_(0, entry, sums)
    features[..., 2].scatter_reduce_(0, entry[:, None].expand_as(norms), norms, "amax")


def to_stored_order(inputs: torch.Tensor) -> torch.Tensor:
    """(n, K) inputs as (n, 32 * words) in the stored column order, zero at padding positions."""
    columns = inputs.shape[1]
    stored, padding = _stored_index(columns, inputs.device)
    permuted = inputs.index_select(1, stored)
    return permuted if padding is None else permuted.index_fill_(1, padding, 0.0)


def decode_blocks(
    tables: BlockTables, rows: torch.Tensor, geometry: PlaneGeometry, codebooks: Mapping[int, str]
) -> torch.Tensor:
    """The linear-blocks of table rows (B,) at their committed widths: fp32 (B, N, 32 * words) in stored order.

    codebooks: by width. Padding positions hold zero. Reads only committed planes and tables.
    """
    widths = tables.bits[rows]
    values = torch.empty(len(rows), geometry.rows, 32 * geometry.words, device=rows.device)
    for width in widths.unique().tolist():
        chosen = (widths == width).nonzero()[:, 0]
        codes = _block_codes(tables, rows[chosen], geometry, width)
        entries = _block_entries(tables, rows[chosen], geometry.rows, width, codebooks[width])
        row_start = torch.arange(0, entries.numel(), 2**width, dtype=torch.int32, device=rows.device)
        index = row_start.view(*codes.shape[:2], 1) + codes.int()
        # index_select: four times faster than indexing on a CPU.
        values[chosen] = entries.view(-1).index_select(0, index.view(-1)).view(codes.shape)
    padding = _stored_index(geometry.columns, rows.device)[1]
    return values if padding is None else values.index_fill_(2, padding, 0.0)


def _block_entries(tables: BlockTables, rows: torch.Tensor, height: int, width: int, codebook: str) -> torch.Tensor:
    """(B, N, 2^width) fp32: the value of every code in linear-blocks of N = height rows."""
    offsets = (tables.table_address[rows] - tables.memory.data_ptr()).tolist()
    size = table_bytes(codebook, height, width)
    octets = torch.stack([tables.memory[offset : offset + size] for offset in offsets])
    return table_values(table_from_bytes(octets, codebook, width), width)


def _block_codes(tables: BlockTables, rows: torch.Tensor, geometry: PlaneGeometry, width: int) -> torch.Tensor:
    """(B, N, 32 * words) uint8 codes: eight at a time, a byte of a plane spread over the bytes of an int64."""
    # Frames need not lie at multiples of their size: a serving engine's KV blocks hold some too.
    frames = tables.memory.unfold(0, geometry.frame_bytes, _ADDRESS_STEP)
    offsets = tables.frame_address[rows, :width, : geometry.frames] - tables.memory.data_ptr()
    pages = frames.index_select(0, offsets.flatten() // _ADDRESS_STEP).view(*offsets.shape, -1)
    planes = _row_major(pages, geometry)
    spread = _spread_table(rows.device)
    codes = spread.index_select(0, planes[:, 0].flatten())
    for plane in range(1, width):
        codes.bitwise_left_shift_(1).bitwise_or_(spread.index_select(0, planes[:, plane].flatten()))
    return codes.view(torch.uint8).view(len(rows), geometry.rows, 32 * geometry.words)


def _row_major(pages: torch.Tensor, geometry: PlaneGeometry) -> torch.Tensor:
    """(B, b, F, frame_bytes) frames as (B, b, N, 4 * words) int32 bytes, every row's column blocks side by side."""
    blocks, per_frame = geometry.full_blocks, geometry.rows_per_frame
    full_bytes = per_frame * 4 * BLOCK_WORDS * blocks
    tail_bytes = per_frame * 4 * geometry.tail_words
    full = pages[..., :full_bytes].unflatten(-1, (blocks, per_frame, 4 * BLOCK_WORDS)).transpose(-3, -2).flatten(-2)
    tail = pages[..., full_bytes : full_bytes + tail_bytes].unflatten(-1, (per_frame, 4 * geometry.tail_words))
    return torch.cat([full, tail], dim=-1).flatten(-3, -2)[..., : geometry.rows, :].int()


def _chunks(pairs: Pairs, weights_per_expert: int) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Active experts with the pairs of each, few enough at a time to decode DECODED_WEIGHTS together."""
    active = [expert for expert, count in enumerate(pairs.counts) if count]
    groups = pairs.order.split([pairs.counts[expert] for expert in active]) if active else ()
    step = max(1, DECODED_WEIGHTS // weights_per_expert)
    return [(active[i : i + step], list(groups[i : i + step])) for i in range(0, len(active), step)]


@lru_cache(maxsize=64)
def _stored_index(columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(stored position -> column, clipped to K; positions that are padding or None)."""
    with torch.inference_mode(False):
        stored = torch.from_numpy(stored_columns(columns).copy())
        padding = (stored >= columns).nonzero()[:, 0]
        index = stored.clamp(max=columns - 1).to(device)
        return index, padding.to(device) if len(padding) else None


@lru_cache(maxsize=8)
def _spread_table(device: torch.device) -> torch.Tensor:
    """(256,) int64: bit j of the index in byte j."""
    with torch.inference_mode(False):
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        return bits.to(torch.uint8).view(torch.int64)[:, 0].to(device)
