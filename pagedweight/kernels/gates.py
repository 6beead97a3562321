"""Activations inside kernels, fp32 in and out, by their name in layout.ACTIVATIONS, as `reference.combine` has them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activation(value, ACTIVATION: tl.constexpr):
    """silu(v) = v sigmoid(v); gelu_tanh(v) = v sigmoid(2 sqrt(2 / pi) (v + 0.044715 v^3)); relu2(v) = max(v, 0)^2."""
    tl.static_assert(
        (ACTIVATION == "silu") or (ACTIVATION == "gelu_tanh") or (ACTIVATION == "relu2"), "unknown activation"
    )
    if ACTIVATION == "silu":
        return value * tl.sigmoid(value)
    elif ACTIVATION == "relu2":
        positive = _at_least(value, 0.0)
        return positive * positive
    else:
        # 1.5957691216 = 2 sqrt(2 / pi); tanh(a) = 2 sigmoid(2 a) - 1 folds the 0.5 (1 + tanh) into one sigmoid.
        return value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))


@triton.jit
def gated_activation(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """What down takes in, from the products of an expert's gate and up rows."""
    if (ACTIVATION == "clamped_silu") or (ACTIVATION == "capped_silu") or (ACTIVATION == "gpt_oss"):
        up = _at_least(_at_most(up, LIMIT), -LIMIT)
        if ACTIVATION == "capped_silu":
            return _at_most(activation(gate, "silu"), LIMIT) * up
        gate = _at_most(gate, LIMIT)
        if ACTIVATION == "gpt_oss":
            return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
        return activation(gate, "silu") * up
    else:
        return activation(gate, ACTIVATION) * up


@triton.jit
def _at_most(value, limit):
    # Comparisons keep a NaN, as torch.clamp does: a bad token must be seen.
    return tl.where(value > limit, limit, value)


@triton.jit
def _at_least(value, limit):
    return tl.where(value < limit, limit, value)
