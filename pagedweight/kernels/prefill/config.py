"""Launch settings of the prefill products, as data, and which devices can run them. Needs no Gluon."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

WARP_GROUP_GENERATION = 9  # Hopper, the one generation with these products
OLDEST_TRITON = (3, 6)  # whose Gluon has all that the kernels use


class PrefillConfig(NamedTuple):
    """How both launches cut their work; the defaults were the fastest on an H200, see docs/prefill.md.

    rows: operand rows a program, 16 for each of its warps. tokens: most pairs of an expert that a program decodes
    weights for at once. few: tiles with no more pairs than this take a narrower product.
    """

    rows: int = 128
    tokens: int = 128
    few: int = 64


def can_prefill(x: torch.Tensor) -> bool:
    """Whether this path serves the batch: a 16-bit type on Hopper, and a Triton that has Gluon."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16)
        and len(x) > 0
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device)[0] == WARP_GROUP_GENERATION
        and tuple(int(part) for part in triton.__version__.split(".")[:2]) >= OLDEST_TRITON
    )
