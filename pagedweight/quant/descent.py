"""One block of columns of joint coordinate descent: each column's code, the best given all the others, in turn.

With v_b(c) the value of parent code c at width b, and o_b = sum over the other columns of D_b H, the loss of a code is
h sum_b worth_b v_b(c)^2 - 2 sum_b worth_b v_b(c) (h w + o_b), up to what no code changes. Rows know nothing of each
other, so on a GPU a program takes a row through the whole block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Sweep(NamedTuple):
    """What a pass over the columns works on, fp32 but for the codes.

    weight: (E, N, K). moment: (1 or E, K, K). values: (W, E, N, C), of every parent code. worth: (W, E, 1, 1).
    codes: uint8 (E, N, K) and errors: (W, E, N, K), weight minus values, both in place.
    """

    weight: Tensor
    moment: Tensor
    values: Tensor
    worth: Tensor
    codes: Tensor
    errors: Tensor

    def move(self, first: int, last: int) -> None:
        """Set the codes of columns first..last - 1."""
        gradients = self.errors @ self.moment[:, :, first:last]
        if self.weight.is_cuda:
            with torch.cuda.device(self.weight.device):  # Triton launches on the current one
                launch_move_columns(self, gradients, first)
        else:
            move_columns_reference(self, gradients, first)


def move_columns_reference(sweep: Sweep, gradients: Tensor, first: int) -> None:
    """gradients: (W, E, N, columns), errors times the moment at columns `first` and on; they are used up."""
    weight, moment, values, worth, codes, errors = sweep
    weighed = worth * values
    squares = (weighed * values).sum(0)
    last = first + gradients.shape[-1]
    for column in range(first, last):
        curvature = moment[:, column, column].view(-1, 1)
        given, error = weight[..., column], errors[..., column]
        pull = gradients[..., column - first] + curvature * (given - error)
        cost = curvature.unsqueeze(-1) * squares
        for width_pull, width_values in zip(pull, weighed, strict=True):
            cost.addcmul_(width_pull.unsqueeze(-1), width_values, value=-2)
        best = cost.argmin(2, keepdim=True)
        codes[:, :, column] = best.squeeze(2).byte()
        fresh = given - values.gather(3, best.expand(len(values), *best.shape)).squeeze(3)
        gradients.addcmul_((fresh - error).unsqueeze(3), moment[:, column, first:last].unsqueeze(1))
        errors[..., column] = fresh


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


def launch_move_columns(sweep: Sweep, gradients: Tensor, first: int) -> None:
    """`move_columns_reference` on a GPU; gradients are left as they are. Tensors are contiguous."""
    weight, moment, values, worth, codes, errors = sweep
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
