"""The launch before the products, where there is something to prepare: grouping by expert, int8 activations."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import digits, slots


@triton.jit(do_not_specialize=["tokens", "slot_count"])
def _prepare_kernel(
    x_ptr, digits_ptr, scales_ptr, ids_ptr, plan_ptr, tokens, slot_count,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr,
    BINS: tl.constexpr, TOKENS: tl.constexpr, ORDERS: tl.constexpr, ROW: tl.constexpr, PLANNED: tl.constexpr,
    INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one expert's slots, or one segment of one token's digits.

    Grid (EXPERTS if PLANNED + tokens * segments if INT8,).
    """
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PLANS: tl.constexpr = EXPERTS if PLANNED else 0
    if program < PLANS:
        if PLANNED:
            slots.plan_expert(
                ids_ptr, plan_ptr, program, tokens * CHOICES, slot_count, EXPERTS, PAIRS, SLOTS, BINS, TOKENS
            )
    else:
        if INT8:
            SEGMENTS: tl.constexpr = (ROW + digits.SEGMENT - 1) // digits.SEGMENT
            item = program - PLANS
            digits.quantize_segment(
                x_ptr, digits_ptr, scales_ptr, item // SEGMENTS, item % SEGMENTS, HIDDEN, ORDERS, ROW
            )
