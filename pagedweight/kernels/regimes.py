"""Which kernels serve a batch on a CUDA device: the one place where the regime is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedweight.kernels.decode.launch import can_decode, launch_decode_moe
from pagedweight.kernels.fused_moe import launch_fused_moe


def choose_regime(x: torch.Tensor, plain: bool = True) -> Callable[..., torch.Tensor]:
    """The launcher for (T, H) inputs, from shapes and types alone: a captured graph stays right.

    plain: silu or gelu_tanh with a gate and without biases; small batches and the grouped kernels serve the rest too.
    """
    return launch_decode_moe if can_decode(x) else launch_fused_moe
