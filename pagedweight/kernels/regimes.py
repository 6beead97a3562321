"""Which kernels serve a batch on a CUDA device: the one place where the regime is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedweight.kernels.decode.launch import can_decode, launch_decode_moe
from pagedweight.kernels.fused_moe import launch_fused_moe


def choose_regime(x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The launcher for (T, H) inputs, from shapes and types alone: a captured graph stays right."""
    return launch_decode_moe if can_decode(x) else launch_fused_moe
