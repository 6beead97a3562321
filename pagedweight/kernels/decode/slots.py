"""Which expert and which of its routed pairs one program works on, and how pairs are grouped by expert.

A pair is (token, choice), numbered token * A + choice. A slot is one expert with at most TOKENS of its pairs. One
token needs no grouping: its choices are the slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAN_HEADER = tl.constexpr(2)  # expert, pairs; then the pairs


@triton.jit
def experts_of(ids, experts):
    """int32 experts of ids of any integer type, -1 where an id is none: compared first, for a cast would wrap."""
    return tl.where((ids >= 0) & (ids < experts), ids, -1).to(tl.int32)


@triton.jit
def slot_pairs(plan_ptr, ids_ptr, slot, column, experts, TOKENS: tl.constexpr, PLANNED: tl.constexpr):
    """(expert, pairs in the slot, pair of each of the token numbers `column`); no pairs: nothing to do."""
    if PLANNED:
        plan_ptr += slot * (PLAN_HEADER + TOKENS)
        expert = tl.load(plan_ptr)
        pairs = tl.load(plan_ptr + 1)
        return expert, pairs, tl.load(plan_ptr + PLAN_HEADER + column)
    else:
        expert = experts_of(tl.load(ids_ptr + slot), experts)
        return expert, (expert >= 0).to(tl.int32), column * 0 + slot


@triton.jit
def plan_expert(
    ids_ptr, plan_ptr, expert, pairs, slots, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr,
    BINS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write one expert's slots. Slots come in expert order; the first expert's program marks the unused ones empty.

    PAIRS, SLOTS and BINS are powers of two, BINS above EXPERTS: the last bins take the ids that are no expert.
    """
    pair = tl.arange(0, PAIRS)
    ids = experts_of(tl.load(ids_ptr + pair, pair < pairs, other=-1), EXPERTS)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.where(ids >= 0, ids, EXPERTS), BINS)
    expert_slots = tl.where(bins < EXPERTS, (counts + TOKENS - 1) // TOKENS, 0)
    first = tl.sum(tl.where(bins < expert, expert_slots, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    row_ptr = plan_ptr + first * (PLAN_HEADER + TOKENS)
    for group in range((count + TOKENS - 1) // TOKENS):
        tl.store(row_ptr + group * (PLAN_HEADER + TOKENS), expert)
        tl.store(row_ptr + group * (PLAN_HEADER + TOKENS) + 1, tl.minimum(count - group * TOKENS, TOKENS))
    mine = ids == expert
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(row_ptr + (rank // TOKENS) * (PLAN_HEADER + TOKENS) + PLAN_HEADER + rank % TOKENS, pair, mine)
    if expert == 0:
        slot = tl.arange(0, SLOTS)
        unused = (slot >= tl.sum(expert_slots)) & (slot < slots)
        tl.store(plan_ptr + slot * (PLAN_HEADER + TOKENS) + 1, 0, unused)
