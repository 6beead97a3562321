"""Tables of the four codebooks, fitted to codes that are already fixed.

A fit needs only each code's total importance and weighted mean: the squared error of any table differs from
sum_c weight[c] (mean[c] - value[c])^2 by a constant. `pagedweight.bitplane.table_values` defines the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedweight.bitplane import LUT8_ZERO
from pagedweight.layout import check_codebook

SMOOTH_CODEBOOKS = ("cubic", "affine")  # formulas: a code's value cannot move without the others'
FP16_MAX = torch.finfo(torch.float16).max
RIDGE = 1e-9  # relative to the system's mean diagonal: rows with fewer codes than coefficients stay solvable
LUT8_LEVELS = 63  # bytes 1..127 around 64
LUT8_REFITS = 3


def fit_table(codebook: str, weights: Tensor, means: Tensor) -> Tensor:
    """The codebook's table for codes of known importance and mean, least squares per row.

    weights, means: (..., N, 2^b) fp64; codes of weight 0 do not count, but lut16 and lut8 give them their mean too.
    Values beyond fp16 saturate at +-65504, so every table is finite.
    """
    bits = weights.shape[-1].bit_length() - 1
    check_codebook(codebook, bits)
    return {"lut16": _fit_lut16, "lut8": _fit_lut8, "cubic": _fit_cubic, "affine": _fit_affine}[codebook](
        weights, means
    )


def _fit_lut16(weights: Tensor, means: Tensor) -> Tensor:
    return means.clamp(-FP16_MAX, FP16_MAX).half()


def _fit_lut8(weights: Tensor, means: Tensor) -> Tensor:
    scale = (means.abs().amax(-1, keepdim=True) / LUT8_LEVELS).float()
    for _ in range(LUT8_REFITS):
        steps = _steps_of(means, scale)
        energy = (weights * steps * steps).sum(-1, keepdim=True)
        best = (weights * steps * means).sum(-1, keepdim=True) / energy.clamp_min(torch.finfo(torch.float64).tiny)
        scale = torch.where(energy > 0, best, scale).float()
    octets = (_steps_of(means, scale) + LUT8_ZERO).to(torch.uint8)
    return torch.cat([octets, scale.contiguous().view(torch.uint8)], dim=-1)


def _steps_of(means: Tensor, scale: Tensor) -> Tensor:
    return (means / torch.where(scale > 0, scale, 1.0)).round().clamp(-LUT8_LEVELS, LUT8_LEVELS)


def smooth_basis(codebook: str, bits: int) -> Tensor:
    """The (2^bits, D) fp64 matrix that maps a cubic's or affine's D table entries to the values of the codes."""
    half = 1 << (bits - 1)
    codes = torch.arange(2 * half, dtype=torch.float64) - half
    if codebook == "affine":
        return torch.stack([codes + 0.5, torch.ones_like(codes)], -1)
    v = codes / half
    return torch.stack([v**3, v**2, v, torch.ones_like(v)], -1)


def _fit_cubic(weights: Tensor, means: Tensor) -> Tensor:
    coefficients = _least_squares("cubic", weights, means)
    return coefficients.clamp(-FP16_MAX, FP16_MAX).half()


def _fit_affine(weights: Tensor, means: Tensor) -> Tensor:
    return _least_squares("affine", weights, means).float()


def _least_squares(codebook: str, weights: Tensor, means: Tensor) -> Tensor:
    """Coefficients (..., N, D) that minimise sum_c weights (means - basis @ coefficients)^2."""
    basis = smooth_basis(codebook, weights.shape[-1].bit_length() - 1).to(weights.device)
    size = basis.square().mean(0).sqrt()  # columns of like size: the ridge then favours none
    weighted = weights.unsqueeze(-1) * (basis / size)
    system = weighted.mT @ (basis / size)
    trace = system.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    system = system + RIDGE * trace * torch.eye(basis.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve(system, weighted.mT @ means.unsqueeze(-1)).squeeze(-1) / size
