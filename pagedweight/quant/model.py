"""Linear-blocks to nested planes and tables, one or a whole stack of experts at once, and their sensitivity (Eq. 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from pagedweight.bitplane import dequantize, pack_codes
from pagedweight.layout import PackedBlock, check_codebook, normalized_widths
from pagedweight.quant.codebooks import FP16_MAX, SMOOTH_CODEBOOKS, fit_table
from pagedweight.quant.kmeans import cluster_rows
from pagedweight.quant.sorted_rows import fill_empty

# On trained rows a 3-bit seed loses 4 to 8 % against a 2-bit one at 2 bits, and wins 5 to 11 % at 3, 3 to 6 % at 4
# and 0 to 6 % at 5 bits.
SEED_WIDTH = 3
CHUNK_WEIGHTS = {"cpu": 1 << 15, "cuda": 1 << 22}  # weights in flight: the working set is about 250 bytes for each

SUM_WEIGHTS = {"cpu": 1 << 18, "cuda": 1 << 22}  # in fp64 at once


class _Fitted(NamedTuple):
    codes: Tensor
    tables: dict[int, Tensor]


def quantize_block(
    weight: Tensor,
    widths: Sequence[int],
    *,
    importance: Tensor | None = None,
    seed: int = 0,
    codebooks: Mapping[int, str] | None = None,
    name: str = "weight",
) -> PackedBlock:
    """One linear-block, weight (N, K); see `quantize_stack`."""
    if weight.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; a linear-block is (N, K)")
    return quantize_stack(
        weight.unsqueeze(0), widths, importance=importance, seed=seed, codebooks=codebooks, names=[name]
    )[0]


def quantize_stack(
    weight: Tensor,
    widths: Sequence[int],
    *,
    importance: Tensor | None = None,
    seed: int = 0,
    codebooks: Mapping[int, str] | None = None,
    names: Sequence[object] | None = None,
) -> list[PackedBlock]:
    """The E linear-blocks of one projection as nested codes and a table for every width, on the weight's device.

    weight: (E, N, K), any float dtype. importance: not negative, broadcastable to (E, N, K); ones by default.
    codebooks: by width, lut16 where not given. names: of the E blocks, for messages.
    Equal inputs give equal bytes: nothing is drawn at random, so every seed gives the same result. Values beyond
    +-65504 (fp16) saturate. A row with at most 2^b distinct values is exact (to fp16) in lut16 at b bits and above.
    ValueError, naming the block, when a weight or importance is not finite or an importance is negative.
    """
    del seed  # part of every quantizer's signature; this one needs no random numbers
    if weight.ndim != 3 or weight.numel() == 0:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}; a stack is (E, N, K) with all sizes >= 1")
    widths = normalized_widths(tuple(widths))
    chosen = {bits: (codebooks or {}).get(bits, "lut16") for bits in widths}
    for bits, codebook in chosen.items():
        check_codebook(codebook, bits)
    importance = torch.ones((), device=weight.device) if importance is None else importance.to(weight.device)
    importance = torch.broadcast_to(importance, weight.shape)
    names = names or [f"expert {expert}" for expert in range(weight.shape[0])]
    for member, stakes, name in zip(weight, importance, names, strict=True):
        _check(member, stakes, name)
    return _split(_fit_stack(weight, importance, chosen), weight.shape, chosen)


def _fit_stack(weight: Tensor, importance: Tensor, codebooks: Mapping[int, str]) -> _Fitted:
    """Codes and tables of all E N rows, chunk by chunk: rows know nothing of each other, whatever block they are of."""
    experts, rows, columns = weight.shape
    step = max(1, CHUNK_WEIGHTS.get(weight.device.type, 1 << 20) // columns)

    def fit(first: int) -> _Fitted:
        row = torch.arange(first, min(first + step, experts * rows), device=weight.device)
        at = (row // rows, row % rows)
        return _fit_rows(weight[at].double().clamp(-FP16_MAX, FP16_MAX), importance[at].double(), codebooks)

    starts = range(0, experts * rows, step)
    if weight.device.type == "cpu" and len(starts) > 1:
        # Chunks fit a core's cache, and their steps are too short for torch to share among threads itself.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            parts = list(pool.map(fit, starts))
    else:
        parts = [fit(first) for first in starts]
    return _Fitted(
        torch.cat([part.codes for part in parts]),
        {bits: torch.cat([part.tables[bits] for part in parts]) for bits in codebooks},
    )


def _split(fitted: _Fitted, shape: Sequence[int], codebooks: Mapping[int, str]) -> list[PackedBlock]:
    experts, rows, columns = shape
    codes = fitted.codes.view(experts, rows, columns)
    tables = {bits: table.view(experts, rows, -1) for bits, table in fitted.tables.items()}
    return [
        PackedBlock(pack_codes(codes[e], max(codebooks)), {bits: t[e].clone() for bits, t in tables.items()}, columns)
        for e in range(experts)
    ]


def _check(weight: Tensor, importance: Tensor, name: object) -> None:
    if not weight.isfinite().all():
        raise ValueError(f"{name} holds NaN or infinite weights; repair the model before quantizing it")
    if not importance.isfinite().all() or (importance < 0).any():
        raise ValueError(f"the importance of {name} holds NaN, infinite or negative values; give finite values >= 0")


def _seed_width(codebooks: Mapping[int, str]) -> int:
    smooth = [bits for bits, codebook in codebooks.items() if codebook in SMOOTH_CODEBOOKS]
    return min(SEED_WIDTH, max(smooth, default=max(codebooks)))


def _fit_rows(values: Tensor, importance: Tensor, codebooks: Mapping[int, str]) -> _Fitted:
    parent_width = max(codebooks)
    scale = values.abs().amax(1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    clusters = cluster_rows(values / scale, importance, codebooks, _seed_width(codebooks))
    tables = {}
    weights, means = clusters.weights, clusters.means
    for bits in range(parent_width, min(codebooks) - 1, -1):
        if bits < parent_width:
            weights, means = _merge_pairs(weights, means)
        if bits in codebooks:
            tables[bits] = fit_table(codebooks[bits], weights, means * scale)
    return _Fitted(clusters.codes, tables)


def _merge_pairs(weights: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Importance and means of codes one bit shorter."""
    pairs = weights.unflatten(1, (-1, 2))
    total = pairs.sum(2)
    share = pairs / torch.where(total > 0, total, 1.0).unsqueeze(2)
    return total, fill_empty((share * means.unflatten(1, (-1, 2))).sum(2), total > 0)


def sensitivity(weight: Tensor, packed: PackedBlock, importance: Tensor | None = None) -> Tensor:
    """Eq. (2): the importance-weighted squared error at every width of the block, ascending, (W,) fp64.

    weight: (N, K). importance: broadcastable to (N, K), ones by default.
    """
    stakes = torch.ones((), dtype=torch.float64) if importance is None else importance.double()
    stakes = torch.broadcast_to(stakes.to(packed.planes.device), weight.shape)
    widths = sorted(packed.tables)
    total = torch.zeros(len(widths), dtype=torch.float64, device=packed.planes.device)
    step = max(1, SUM_WEIGHTS.get(weight.device.type, 1 << 18) // weight.shape[1])
    for chunk in (slice(first, first + step) for first in range(0, weight.shape[0], step)):
        rows = PackedBlock(packed.planes[:, chunk], {b: t[chunk] for b, t in packed.tables.items()}, packed.columns)
        errors = [(weight[chunk].double() - dequantize(rows, bits)).square() for bits in widths]
        total += torch.stack([(stakes[chunk] * error).sum() for error in errors])
    return total
