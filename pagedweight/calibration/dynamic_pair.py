"""DP-LLM's rule for experts, to compare quality with: each token takes one of two widths of a linear-block.

A token's error at the lower width is estimated as x^2 . c, with c_j the squared difference of the two widths' columns;
tokens above a threshold take the higher width. Both widths of every linear-block are held at once, so nothing is saved
by it and no kernel serves it. Thresholds are quantiles over calibration text, the same share for every linear-block:
DP-LLM tunes the shares on text by gradient, which is left out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pagedweight.bitplane import dequantize
from pagedweight.calibration.capture import replaced_forward, routed_pairs
from pagedweight.discovery import ExpertsModule
from pagedweight.layout import BlockId, PackedBlock, Projection


class _Pair(NamedTuple):
    """A linear-block at two widths: (N, K) each, and (K,) what a column's square adds to the lower one's error."""

    low: Tensor
    high: Tensor
    column_error: Tensor

    @classmethod
    def of(cls, packed: PackedBlock, low_bits: int, high_bits: int, device: torch.device) -> _Pair:
        low, high = (dequantize(packed, bits).to(device) for bits in (low_bits, high_bits))
        return cls(low, high, (high - low).square().sum(0))


class DynamicPair:
    """Experts that choose between two widths for each token; a share of 0 is the lower width throughout, 1 the higher.

    block: the quantized linear-blocks. share: of routed tokens that should take the higher width.
    """

    def __init__(
        self,
        found: Sequence[ExpertsModule],
        block: Callable[[BlockId], PackedBlock],
        low_bits: int,
        high_bits: int,
    ) -> None:
        if low_bits >= high_bits:
            raise ValueError(f"the lower width is {low_bits} and the higher {high_bits}; give the lower one first")
        self._found = found
        self._bits = low_bits, high_bits
        self._pairs = {
            name: _Pair.of(block(name), low_bits, high_bits, experts.device)
            for experts in found
            for name in _names(experts)
        }
        self._threshold = dict.fromkeys(self._pairs, -torch.inf)
        self._errors: dict[BlockId, list[Tensor]] | None = None
        self._taken = self._high = 0

    @property
    def mean_bits(self) -> float:
        """Over the routed tokens of all forwards since the last calibration."""
        low, high = self._bits
        return low + (high - low) * self._high / max(self._taken, 1)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The model's experts choose; their own forwards come back, whatever happens."""
        with ExitStack() as undo:
            for experts in self._found:
                undo.enter_context(replaced_forward(experts.module, partial(self._forward, experts)))
            yield

    @torch.no_grad()
    def calibrate(self, run: Callable[[], object], share: float) -> None:
        """Thresholds so that `share` of the tokens that run() routes take the higher width in every linear-block.

        run: forwards of the model over calibration text; they take the higher width. Blocks it never reaches take the
        lower one.
        """
        self._threshold = dict.fromkeys(self._pairs, -torch.inf)
        self._errors = {name: [] for name in self._pairs}
        try:
            with self.installed():
                run()
            seen = self._errors
        finally:
            self._errors = None
        for name, errors in seen.items():
            self._threshold[name] = _threshold(torch.cat(errors), share) if errors else torch.inf
        self._taken = self._high = 0

    def _forward(self, experts: ExpertsModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """(T, H), from (T, A) ids and weights, as the module's own forward."""
        total = torch.zeros_like(x, dtype=torch.float32)
        layer, module = experts.shape.layer, experts.module
        for expert, token, slot in routed_pairs(ids, experts.shape.experts):
            product = self._product(BlockId(layer, expert, Projection.GATE_UP), x[token].float())
            down = self._product(BlockId(layer, expert, Projection.DOWN), module._apply_gate(product))
            total.index_add_(0, token, down * weights[token, slot, None].float())
        return total.to(x.dtype)

    def _product(self, name: BlockId, x: Tensor) -> Tensor:
        pair = self._pairs[name]
        error = x.square() @ pair.column_error
        high = error > self._threshold[name]
        if self._errors is not None:
            self._errors[name].append(error)
        self._taken += len(high)
        self._high += int(high.sum())
        return torch.where(high[:, None], x @ pair.high.T, x @ pair.low.T)


def _names(experts: ExpertsModule) -> Iterator[BlockId]:
    for expert in range(experts.shape.experts):
        for projection in Projection:
            yield BlockId(experts.shape.layer, expert, projection)


def _threshold(errors: Tensor, share: float) -> float:
    """The error that a share of them exceeds."""
    if share <= 0:
        return torch.inf
    return -torch.inf if share >= 1 else float(errors.quantile(1 - share))


def high_share(low_bits: int, high_bits: int, target_bits: float) -> float:
    """The share at the higher width for a mean of target_bits. ValueError outside the pair."""
    if not low_bits <= target_bits <= high_bits:
        raise ValueError(f"a mean of {target_bits} bits cannot be had from {low_bits} and {high_bits} bits")
    return (target_bits - low_bits) / (high_bits - low_bits)
