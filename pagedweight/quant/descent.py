"""One block of columns of joint coordinate descent: each column's code, the best given all the others, in turn.

With v_b(c) the value of parent code c at width b, and o_b = sum over the other columns of D_b H, the loss of a code is
h sum_b worth_b v_b(c)^2 - 2 sum_b worth_b v_b(c) (h w + o_b), up to what no code changes. Rows know nothing of each
other, so on a GPU a program takes a row through the whole block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
            from pagedweight.quant.descent_kernel import launch_move_columns  # only where Triton is needed

            with torch.cuda.device(self.weight.device):  # Triton launches on the current one
                launch_move_columns(*self, gradients, first)
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
