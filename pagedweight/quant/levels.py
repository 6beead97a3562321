"""The quantizer's levels: how much is done for the codes and tables of a stack of experts, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagedweight.layout import PackedBlock
from pagedweight.quant.model import quantize_stack
from pagedweight.quant.refine import SWEEP_BYTES, refine_stack

# Sweeps of joint coordinate descent after weighted k-means; None leaves its tables as they are, 0 refits them only.
LEVELS: Mapping[str, int | None] = {"fast": None, "balanced": 0, "best": 4}
GROUP_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}  # of fp32 weights and second moments that are worked on at once


class Stakes(Protocol):
    """What calibration knows of a stack of experts: `pagedweight.calibration.importance.Importance`."""

    @property
    def correlated(self) -> bool:
        """Whether second moments say more than their diagonal."""

    def on(self, device: torch.device) -> Stakes:
        """The same on another device."""

    def weights(self) -> Tensor:
        """Importance of the columns, fp32 (E, 1, K)."""

    def second_moment(self, expert: int) -> Tensor:
        """What an expert's row errors are weighed with, fp32 (K, K)."""

    def s_bar(self, expert: int, weight: Tensor, packed: PackedBlock, widths: Sequence[int]) -> list[float]:
        """Damage of one linear-block at each width, nats per token and routing mass."""


class Settings(NamedTuple):
    """How every linear-block of a model is quantized. codebooks: by width."""

    level: str
    widths: tuple[int, ...]
    codebooks: Mapping[int, str]
    seed: int = 0


def check_level(level: str, calibrated: bool) -> None:
    """ValueError for a level that does not exist, or that needs calibration when there is none."""
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; the levels are {', '.join(LEVELS)}")
    if LEVELS[level] is not None and not calibrated:
        raise ValueError(f"level {level!r} weighs errors by calibration; give calibration, or take level 'fast'")


def quantize_experts(
    weight: Tensor,
    settings: Settings,
    stakes: Stakes | None = None,
    *,
    importance: Tensor | None = None,
    names: Sequence[object] | None = None,
) -> Iterator[PackedBlock]:
    """The E linear-blocks of one projection, one after another, on the weight's device.

    weight: (E, N, K). stakes: calibration's, of these E experts. importance: instead of its column weights, as
    `quantize_stack` takes it. names: of the E blocks, for messages.
    Memory beside the result is bounded by GROUP_BYTES and the working sets of k-means and descent, whatever E is.
    """
    names = names or [f"expert {expert}" for expert in range(len(weight))]
    sweeps = LEVELS[settings.level]
    refined = sweeps is not None and stakes is not None and stakes.correlated
    if importance is None and stakes is not None:
        importance = stakes.weights()
    if importance is not None:
        importance = torch.broadcast_to(importance.to(weight.device), weight.shape)
    sweep_bytes = SWEEP_BYTES.get(weight.device.type, 1 << 26)
    if weight.device.type == "cuda":  # as much as the stack in 16 bits: a few large steps instead of many
        sweep_bytes = max(sweep_bytes, 2 * weight.numel())
    for group in _groups(weight, refined):
        packed = quantize_stack(
            weight[group],
            settings.widths,
            importance=None if importance is None else importance[group],
            seed=settings.seed,
            codebooks=settings.codebooks,
            names=names[group],
        )
        if refined:
            moment = torch.stack([stakes.second_moment(e) for e in range(group.start, group.stop)]).to(weight.device)
            packed = refine_stack(weight[group], packed, moment, sweeps=sweeps, sweep_bytes=sweep_bytes)
        yield from packed


def _groups(weight: Tensor, refined: bool) -> Iterator[slice]:
    """Slices of the experts that are worked on together."""
    experts, rows, columns = weight.shape
    each = 4 * rows * columns + (4 * columns * columns if refined else 0)
    size = max(1, GROUP_BYTES.get(weight.device.type, 1 << 23) // each)
    for first in range(0, experts, size):
        yield slice(first, min(first + size, experts))
