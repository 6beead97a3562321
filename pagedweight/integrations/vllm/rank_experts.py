"""All routed experts of one rank: collected while vLLM builds the model, filled while it loads."""

from __future__ import annotations

import torch

from pagedweight.experts import PagedExperts, TokenSlots
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.page_source import FloatExperts, PageSource
from pagedweight.integrations.vllm.resident import ResidentWeights
from pagedweight.integrations.vllm.shares import ExpertShare
from pagedweight.kernels.device_order import choose_frame_bytes
from pagedweight.layout import RoutingStats


class RankExperts:
    """Shares of MoE layers in the order in which the model is built; the first fill fixes the layout."""

    def __init__(self, source: PageSource, options: ServingOptions, device: torch.device, most_tokens: int) -> None:
        self.source = source
        self._options = options
        self._device = device
        self._shares: list[ExpertShare] = []
        self._weights: ResidentWeights | None = None
        self.slots = TokenSlots(most_tokens, device)

    def add(self, share: ExpertShare) -> int:
        """The layer's index among MoE layers."""
        if self._weights is not None:
            raise RuntimeError(f"layer {share.layer} comes after weights were loaded; build the whole model first")
        self._shares.append(share)
        return len(self._shares) - 1

    def fill(self, index: int, float_experts: FloatExperts | None) -> PagedExperts:
        """Load one layer and return what computes it."""
        if self._weights is None:
            self._weights = self._allocate()
        weights, share = self._weights, self._shares[index]
        layout = weights.layout
        for row, (_, packed) in enumerate(self.source.blocks(share, layout, float_experts), layout.first_row(index)):
            weights.put(row, packed)
        return PagedExperts(
            share.shape,
            index,
            layout.first_row(index),
            weights.tables,
            self._stats,
            self.slots,
            frame_bytes=weights.frame_bytes,
            widths=layout.widths,
            codebooks=layout.codebooks,
        )

    def _allocate(self) -> ResidentWeights:
        layout = self.source.layout([share.shape for share in self._shares])
        width = self._options.bits or layout.parent_width
        if width not in layout.widths:
            raise ValueError(f"pagedweight.bits is {width}; these pages serve {layout.widths}")
        most_experts = max(len(share.experts) for share in self._shares)
        self._stats = RoutingStats.zeros(1, len(self._shares), most_experts, self._device)
        frame_bytes = self._options.frame_bytes or choose_frame_bytes(layout.row_shapes())
        return ResidentWeights(layout, width, frame_bytes, self._device)
