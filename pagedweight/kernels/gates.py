"""Gate activations inside kernels, by their name in layout.ACTIVATIONS."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_activation(gate, ACTIVATION: tl.constexpr):
    """silu(g) = g * sigmoid(g); gelu_tanh(g) = g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)). fp32 in and out."""
    tl.static_assert((ACTIVATION == "silu") or (ACTIVATION == "gelu_tanh"), "unknown activation")
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    else:
        # 1.5957691216 = 2 sqrt(2 / pi); tanh(a) = 2 sigmoid(2 a) - 1 folds the 0.5 (1 + tanh) into one sigmoid.
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
