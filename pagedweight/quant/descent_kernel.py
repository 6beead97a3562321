"""The block of columns of `descent` on a GPU: a program takes a row through it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _move_columns_kernel(
    weight_ptr,
    moment_ptr,
    values_ptr,
    worth_ptr,
    codes_ptr,
    errors_ptr,
    gradients_ptr,
    rows_per_expert,
    first,
    moment_stride,
    K,
    COLUMNS: tl.constexpr,
    COLUMNS2: tl.constexpr,
    WIDTHS: tl.constexpr,
    WIDTHS2: tl.constexpr,
    CODES: tl.constexpr,
):
    """One program: a row's COLUMNS columns, one after another.  Grid (E * N).
    cost[c] = h sum_b worth_b v_b[c]^2 - 2 sum_b worth_b v_b[c] (g_b + h (w - d_b)); the best c moves d_b, and g_b by
    its change times the moment's row."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    expert = row // rows_per_expert
    experts = rows // rows_per_expert
    width, code, column = tl.arange(0, WIDTHS2).to(tl.int64), tl.arange(0, CODES), tl.arange(0, COLUMNS2)
    known, inside = width < WIDTHS, column < COLUMNS
    at = (width * rows + row)[:, None]
    values = tl.load(values_ptr + at * CODES + code[None, :], mask=known[:, None], other=0.0)
    worth = tl.load(worth_ptr + width * experts + expert, mask=known, other=0.0)
    gradients = tl.load(
        gradients_ptr + at * COLUMNS + column[None, :], mask=known[:, None] & inside[None, :], other=0.0
    )
    weighed = worth[:, None] * values
    squares = tl.sum(weighed * values, 0)
    moment = moment_ptr + expert * moment_stride
    for offset in range(COLUMNS):
        here = first + offset
        curvature = tl.load(moment + here * K + here)
        given = tl.load(weight_ptr + row * K + here)
        place = errors_ptr + (width * rows + row) * K + here
        error = tl.load(place, mask=known, other=0.0)
        pull = tl.sum(tl.where(column[None, :] == offset, gradients, 0.0), 1) + curvature * (given - error)
        cost = curvature * squares - 2 * tl.sum(pull[:, None] * weighed, 0)
        best = tl.argmin(cost, 0)
        fresh = given - tl.sum(tl.where(code[None, :] == best, values, 0.0), 1)
        reach = tl.load(moment + here * K + first + column, mask=inside, other=0.0)
        gradients += (fresh - error)[:, None] * reach[None, :]
        tl.store(place, fresh, mask=known)
        tl.store(codes_ptr + row * K + here, best.to(tl.uint8))


def launch_move_columns(
    weight: Tensor,
    moment: Tensor,
    values: Tensor,
    worth: Tensor,
    codes: Tensor,
    errors: Tensor,
    gradients: Tensor,
    first: int,
) -> None:
    """`descent.move_columns_reference` of a `Sweep`'s parts on a GPU: all contiguous; gradients stay as they are."""
    widths, experts, rows, columns = errors.shape
    count = gradients.shape[-1]
    _move_columns_kernel[(experts * rows,)](
        weight,
        moment,
        values,
        worth,
        codes,
        errors,
        gradients,
        rows,
        first,
        columns * columns if len(moment) > 1 else 0,
        columns,
        COLUMNS=count,
        COLUMNS2=max(16, triton.next_power_of_2(count)),
        WIDTHS=widths,
        WIDTHS2=triton.next_power_of_2(widths),
        CODES=values.shape[-1],
        num_warps=1,
    )
