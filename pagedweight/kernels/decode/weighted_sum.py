"""The launch that adds up a batch's parts, where programs of the second launch do not do so themselves."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weighted_sum_kernel(
    parts_ptr, out_ptr, ids_ptr, weights_ptr, HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one token. Grid (tokens, ceil(H / COLUMNS)). out = sum_a r_a sum_s part, in that
    order; zeros for a token without an expert."""
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(CHOICES):
        pair = token * CHOICES + i
        expert = tl.where(column < HIDDEN, tl.load(ids_ptr + pair).to(tl.int32), -1)
        routed = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        for split in tl.static_range(SPLITS):
            part = tl.load(parts_ptr + (pair * SPLITS + split) * HIDDEN + column, routed, other=0.0)
            # The weight of an id that is no expert may be anything.
            total += tl.where(routed, weight * part, 0.0)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), column < HIDDEN)
