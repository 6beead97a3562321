"""Tiny models to calibrate: their experts by structure, batches of random tokens, and routing fixed by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pagedweight.bitplane import dequantize
from pagedweight.calibration.capture import Batch
from pagedweight.calibration.collect import collect
from pagedweight.calibration.sensitivity import original_weight
from pagedweight.calibration.statistics import Statistics
from pagedweight.discovery import find_experts
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection
from pagedweight.quant.model import quantize_block
from tests.hf_models import tokens

WIDTHS = (2, 3, 4)


def modules_of(model: nn.Module) -> list[nn.Module]:
    return [found.module for found in find_experts(model)]


def batch(rows: int, length: int, seed: int = 0, padding: int = 0) -> Batch:
    """Random tokens; the first row ends in padding."""
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, length - padding :] = False
    return Batch(tokens(rows, length, seed), mask)


def route(model: nn.Module, choose: Callable[[int], Tensor]) -> None:
    """Fix every router's choice: `choose` gives (T, A) expert ids for T tokens; weights stay the router's own."""
    for module in list(model.modules()):
        if not (hasattr(module, "gate") and hasattr(module, "experts")):
            continue
        inner = module.gate.forward

        def forward(hidden: Tensor, inner: Callable[[Tensor], tuple[Tensor, ...]] = inner) -> tuple[Tensor, ...]:
            logits, weights, _ = inner(hidden)
            return logits, weights, choose(len(weights))

        module.gate.forward = forward


def among(allowed: list[int], per_token: int) -> Callable[[int], Tensor]:
    """A choice for `route` that deals the allowed experts out evenly."""
    return lambda count: torch.tensor(allowed)[torch.arange(count * per_token).view(count, per_token) % len(allowed)]


def statistics_of(model: nn.Module, *batches: Batch, **options: object) -> Statistics:
    return collect(model, find_experts(model), batches, **options)


def layout_of(model: nn.Module) -> Layout:
    return Layout(tuple(found.shape for found in find_experts(model)), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))


def blocks_of(model: nn.Module) -> dict[BlockId, PackedBlock]:
    """Every linear-block at WIDTHS, importance 1."""
    return {
        BlockId(found.shape.layer, e, projection): quantize_block(original_weight(found.module, e, projection), WIDTHS)
        for found in find_experts(model)
        for e in range(found.shape.experts)
        for projection in Projection
    }


def error_of(model: nn.Module, block: BlockId, packed: PackedBlock, bits: int) -> Tensor:
    return original_weight(modules_of(model)[block.layer], block.expert, block.projection) - dequantize(packed, bits)
