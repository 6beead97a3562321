"""The registered op pagedweight::fused_moe: Triton kernels on CUDA, the torch twin on the CPU.

The dispatcher chooses by device. Importing this module needs no Triton; launching on CUDA does.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedweight.kernels.call import WRITTEN, Call, op_schema
from pagedweight.kernels.checks import check_arguments
from pagedweight.kernels.reference import fused_moe_reference


@torch.library.custom_op("pagedweight::fused_moe", mutates_args=WRITTEN, device_types=("cuda",), schema=op_schema())
def fused_moe(*arguments: Any) -> torch.Tensor:
    """One MoE layer's routed experts over paged planes; adds to the routing statistics. Takes the fields of a `Call`.

    out[t] = sum_a w[t, a] * (down_e combine(gate_up_e x[t] + b_e) + c_e) with e = expert_ids[t, a], summed in fp32;
    `reference.combine` says what an activation does to gate and up.

    Returns (T, H) in x.dtype. Raises ValueError when the arguments do not fit each other.
    """
    call = Call(*arguments)
    check_arguments(call)
    return launch_on_cuda(call)


@fused_moe.register_kernel("cpu")
def _fused_moe_cpu(*arguments: Any) -> torch.Tensor:
    call = Call(*arguments)
    check_arguments(call)
    return fused_moe_reference(call)


@fused_moe.register_fake
def _fused_moe_fake(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def launch_on_cuda(call: Call) -> torch.Tensor:
    """The Triton kernels of the batch's regime. ImportError without Triton."""
    # Not at the top: where Triton has no wheel, everything but this launch must work.
    from pagedweight.kernels.regimes import choose_regime

    # Triton launches on the current device; make that the tensors' own.
    with torch.cuda.device(call.x.device):
        return choose_regime(call.x)(call)
