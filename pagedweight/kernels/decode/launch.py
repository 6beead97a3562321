"""Host side of the decode path: routed experts for up to 64 tokens."""

from __future__ import annotations

import torch

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.config import MAX_TOKENS, DecodeConfig
from pagedweight.kernels.decode.launches import decode_launches, has_ptx


def can_decode(x: torch.Tensor) -> bool:
    """Whether this path serves the batch: at most 64 tokens in a 16-bit type, and on a GPU one that reads its PTX.

    Without it, its tiles take more shared memory than a Turing or an AMD GPU has.
    """
    few = 0 < x.shape[0] <= MAX_TOKENS and x.dtype in (torch.float16, torch.bfloat16)
    return few and (not x.is_cuda or has_ptx(x))


def launch_decode_moe(call: Call, config: DecodeConfig | None = None, use_ptx: bool | None = None) -> torch.Tensor:
    """out[t] = sum_a r[t, a] expert_{id[t, a]}(x[t]) for up to 64 tokens; adds to mass, counts and features.

    use_ptx: decode with inline PTX; by default on NVIDIA GPUs from Ampere on. Scratch comes from torch's allocator;
    nothing waits for the host. ValueError when config cannot run.
    """
    out, launches = decode_launches(call, config, use_ptx)
    for launch in launches:
        launch.run()
    return out
