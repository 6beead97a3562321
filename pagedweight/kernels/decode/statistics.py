"""What a launch adds to RoutingStats: one program per token, beside the programs that do the products."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import slots

NORM_COLUMNS = tl.constexpr(1024)


@triton.jit
def token_choices(
    ids_ptr, weights_ptr, slot_ptr, token, layer, layers, request_slots, counted_experts, experts,
    CHOICES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """(entry of RoutingStats, routing weight, counted, number of experts) of a token's choices, (PADDED,) each.

    counted_experts: experts the statistics have room for, at least the layer's. A weight that is not finite is not
    counted: one bad token must not spoil sums that nobody starts anew.
    """
    choice = tl.arange(0, PADDED)
    expert = slots.experts_of(tl.load(ids_ptr + token * CHOICES + choice, choice < CHOICES, other=-1), experts)
    weight = tl.load(weights_ptr + token * CHOICES + choice, choice < CHOICES, other=0.0).to(tl.float32)
    routed = expert >= 0
    slot = tl.load(slot_ptr + token)
    entry = (slot * layers + layer) * counted_experts + expert
    held = routed & (slot < request_slots) & _is_finite(weight)
    return entry, weight, tl.where(held, slot, -1) >= 0, tl.sum(routed.to(tl.int32))


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def row_norms(x_ptr, start, used, COLUMNS: tl.constexpr):
    """2-norms (M,) of the rows that start at `start` (M,)."""
    squares = tl.zeros((start.shape[0], NORM_COLUMNS), tl.float32)
    for first in range(0, COLUMNS, NORM_COLUMNS):
        column = first + tl.arange(0, NORM_COLUMNS)
        x = tl.load(x_ptr + start[:, None] + column[None, :], used[:, None] & (column < COLUMNS)[None, :], other=0.0)
        squares += x.to(tl.float32) * x.to(tl.float32)
    return tl.sqrt(tl.sum(squares, 1))


@triton.jit
def add_features(features_ptr, entry, weight, norm, counted, PROJECTION: tl.constexpr):
    """features[entry, projection] += (r |x|, r |x|^2), and its maximum of |x|, of norms that are finite."""
    norm = tl.where(_is_finite(norm * norm), norm, 0.0)
    pointer = features_ptr + entry * 6 + PROJECTION * 3
    tl.atomic_add(pointer, weight * norm, counted, sem="relaxed")
    tl.atomic_add(pointer + 1, weight * norm * norm, counted, sem="relaxed")
    tl.atomic_max(pointer + 2, norm, counted, sem="relaxed")
