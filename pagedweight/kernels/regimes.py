"""Which kernels serve a batch on a CUDA device: the one place where the regime is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.launch import can_decode, launch_decode_moe
from pagedweight.kernels.fused_moe import launch_fused_moe
from pagedweight.kernels.prefill.config import can_prefill


def choose_regime(x: torch.Tensor) -> Callable[[Call], torch.Tensor]:
    """The launcher for (T, H) inputs, from shapes and types alone: a captured graph stays right."""
    if can_decode(x):
        return launch_decode_moe
    if can_prefill(x):
        # Not at the top: it needs Gluon, which not every Triton has.
        from pagedweight.kernels.prefill.launch import launch_prefill_moe

        return launch_prefill_moe
    return launch_fused_moe
