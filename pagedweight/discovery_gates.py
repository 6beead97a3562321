"""Which known activation an experts module has, seen by what it does to a few numbers rather than by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagedweight.discovery_storage import alternating
from pagedweight.kernels.reference import combine
from pagedweight.layout import ACTIVATIONS, LIMITED, UNGATED

# Far above any limit in use, small enough that fp64 keeps ten digits of what is multiplied by it.
BEYOND_LIMITS = 1e5
# What a module raises that has the parts of experts and is something else.
UNLIKE_EXPERTS = (AttributeError, TypeError, ValueError, RuntimeError, LookupError)


class KnownGate(NamedTuple):
    """activation and limit as layout.MoeLayer has them."""

    activation: str
    limit: float


def recognise(path: str, module: nn.Module, *, gated: bool, interleaved: bool) -> KnownGate:
    """The activation of a module with `_apply_gate`, or of one without a gate. ValueError when it is none of ours."""

    def apply(products: Tensor) -> Tensor:
        if not gated:
            return module.act_fn(products)
        return module._apply_gate(alternating(products) if interleaved else products)

    return known_gate(path, apply, gated, type(getattr(module, "act_fn", None)).__name__)


def known_gate(path: str, apply: Callable[[Tensor], Tensor], gated: bool, name: str) -> KnownGate:
    """The activation that `apply` is: (n, 2I) gate and up products, gate first, or (n, I) without a gate, to (n, I).

    name: of the activation in the model, for the message of the ValueError.
    """
    what = "combines gate and up" if gated else "activates experts without a gate"
    try:
        known = _seen(apply, gated)
    except UNLIKE_EXPERTS as error:
        raise ValueError(
            f"{path} {what} in a way of its own ({type(error).__name__}: {error}); leave this model unpatched"
        ) from error
    if known is None:
        raise ValueError(
            f"{path} {what} in a way that is not served (its act_fn is {name}); served are "
            f"{', '.join(ACTIVATIONS if gated else UNGATED)}"
        )
    return known


def _seen(apply: Callable[[Tensor], Tensor], gated: bool) -> KnownGate | None:
    """Which of ours does the same to a few numbers, None when none does."""
    with torch.no_grad(), torch.device("cpu"):
        limit = _limit_of(apply) if gated else 0.0
        reach = max(9.0, 3 * limit)
        values = torch.linspace(-reach, reach, 2 * 33, dtype=torch.float64)
        products = values.view(2, 33).T.reshape(3, 22) if gated else values.view(3, 22)
        got = apply(products)
        for activation in LIMITED if limit else UNGATED:
            expected = combine(products, activation, gated, limit)
            if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-5):
                return KnownGate(activation, limit)
    return None


def _limit_of(apply: Callable[[Tensor], Tensor]) -> float:
    """Where the up rows are clamped, 0.0 when they are not.

    An activation of the form f(g) * (clamp(u) + c) does to u what clamp does: three points of a line and its end.
    """
    gate = torch.full((1, 4), 0.5, dtype=torch.float64)
    up = torch.tensor([[0.0, 0.125, BEYOND_LIMITS, 2 * BEYOND_LIMITS]], dtype=torch.float64)
    at_zero, at_step, far, farther = apply(torch.cat([gate, up], dim=1))[0].tolist()
    slope = (at_step - at_zero) / 0.125
    if slope == 0 or far != farther:
        return 0.0
    return round((far - at_zero) / slope, 6)
