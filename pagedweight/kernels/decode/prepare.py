"""The launch before the products of several tokens: grouping by expert, int8 digits of the activations."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import digits, slots


@triton.jit(do_not_specialize=["tokens", "slot_count"])
def _prepare_kernel(
    x_ptr, digits_ptr, scales_ptr, ids_ptr, plan_ptr, tokens, slot_count,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr,
    BINS: tl.constexpr, TOKENS: tl.constexpr, ORDERS: tl.constexpr, ROW: tl.constexpr, INT8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one expert's slots, or one segment of one token's digits.

    Grid (EXPERTS + tokens * segments if INT8,).
    """
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if program < EXPERTS:
        slots.plan_expert(ids_ptr, plan_ptr, program, tokens * CHOICES, slot_count, EXPERTS, PAIRS, SLOTS, BINS, TOKENS)
    elif INT8:
        SEGMENTS: tl.constexpr = (ROW + digits.SEGMENT - 1) // digits.SEGMENT
        item = program - EXPERTS
        digits.quantize_segment(x_ptr, digits_ptr, scales_ptr, item // SEGMENTS, item % SEGMENTS, HIDDEN, ORDERS, ROW)
