"""All routed experts of one rank: collected while vLLM builds the model, filled as it loads, paged as it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.experts import PagedExperts, TokenSlots
from pagedweight.integrations.vllm.commands import StepCommands
from pagedweight.integrations.vllm.frame_copies import FrameCopies, HostFrameCopies
from pagedweight.integrations.vllm.frame_sizes import choose_frame_bytes_for_kv
from pagedweight.integrations.vllm.kv_frames import BlockFrames
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.page_source import FloatExperts, PageSource
from pagedweight.integrations.vllm.rank_pager import RankPager
from pagedweight.integrations.vllm.rank_signals import RankSignals
from pagedweight.integrations.vllm.request_slots import BatchSlots
from pagedweight.integrations.vllm.resident import ResidentWeights
from pagedweight.integrations.vllm.shares import ExpertShare
from pagedweight.kernels.device_order import FRAME_ALIGNMENT, choose_frame_bytes
from pagedweight.layout import Layout, PackedBlock, RoutingStats
from pagedweight.runtime.observe import Signals
from pagedweight.runtime.pages import HostPages, PageSizes


class RankReport(NamedTuple):
    """What the engine must know of a rank. experts: by MoE layer, the model's numbers of those here. sensitivity:
    (R, W) of what this rank quantized itself, None where a checkpoint says it."""

    layout: Layout
    plane_frames: np.ndarray
    frame_bytes: int
    frames_per_block: int
    resident_width: int
    resident_bytes: int
    experts: tuple[tuple[int, ...], ...]
    s_bar: np.ndarray | None


class RankExperts:
    """Shares of MoE layers in the order in which the model is built; the first fill fixes the layout.

    batches: how many tokens steps may have, as far as kernels are compiled before the first; the largest is the most.
    kv_piece_bytes: asked once all layers are there: the smallest contiguous part of a KV block, where frames must fit.
    knows_requests: whether `mark` is called before each forward, so that statistics are kept by request.
    """

    def __init__(
        self,
        source: PageSource,
        options: ServingOptions,
        device: torch.device,
        batches: Sequence[int],
        kv_piece_bytes: Callable[[], int],
    ) -> None:
        self.source = source
        self._options = options
        self._device = device
        self._kv_piece_bytes = kv_piece_bytes
        self._shares: list[ExpertShare] = []
        self._weights: ResidentWeights | None = None
        self._host: HostPages | None = None
        self._pager: RankPager | None = None
        self._slots = TokenSlots(max(batches), device)
        self._batches = tuple(batches)
        self._compiled: set[tuple[object, ...]] = set()
        self.knows_requests = False

    def add(self, share: ExpertShare) -> int:
        """The layer's index among MoE layers."""
        if self._weights is not None:
            raise RuntimeError(f"layer {share.layer} comes after weights were loaded; build the whole model first")
        self._shares.append(share)
        return len(self._shares) - 1

    def fill(self, index: int, float_experts: FloatExperts | None) -> PagedExperts:
        """Load one layer and return what computes it."""
        if self._weights is None:
            self._allocate()
        weights, share = self._weights, self._shares[index]
        layout = weights.layout
        for block, packed in self.source.blocks(share, layout, float_experts):
            self._store(layout.row(block), packed, weights.put(layout.row(block), packed))
        return PagedExperts(
            share.shape,
            index,
            layout.first_row(index),
            weights.tables,
            self._stats,
            self._slots,
            frame_bytes=weights.frame_bytes,
            widths=layout.widths,
            codebooks=layout.codebooks,
        )

    def compile(self, experts: PagedExperts, choices: int, dtype: torch.dtype) -> None:
        """Compile a filled layer's kernels side by side on a GPU, or the first step of each size waited for its own;
        layers of one shape share theirs."""
        key = replace(experts.shape, layer=0), choices, dtype
        if self._device.type != "cuda" or key in self._compiled:
            return
        self._compiled.add(key)
        # Not at the top: it needs Triton.
        from pagedweight.kernels.compiling import compile_kernels

        x = torch.empty(1, experts.shape.hidden, dtype=dtype, device=self._device)
        ids = torch.zeros(1, choices, dtype=torch.int32, device=self._device)  # as vLLM's routers give them
        compile_kernels(experts.call(x, ids, ids.float()), self._batches)

    def attach(self, kv_tensors: Sequence[torch.Tensor], blocks: int) -> RankReport:
        """The KV cache is there: frames can be found in its blocks. ValueError when they cannot."""
        weights = self._weights
        frames = BlockFrames(kv_tensors, blocks, weights.frame_bytes)
        if self._device.type == "cuda" and not frames.aligned(FRAME_ALIGNMENT):
            raise ValueError(
                f"frames in this KV cache are not aligned to {FRAME_ALIGNMENT} bytes; give another block_size, "
                "or serve at fixed pagedweight.bits"
            )
        self._pager = RankPager(weights, self._host, frames, self._copies())
        return RankReport(
            weights.layout,
            weights.plane_frames,
            weights.frame_bytes,
            frames.per_block,
            weights.resident_width,
            weights.bytes,
            tuple(share.experts for share in self._shares),
            self.source.s_bar(weights.layout),
        )

    def boundary(self, commands: StepCommands, tokens: int) -> None:
        """Between two forwards: what the engine says. tokens: of the coming forward; those after them are padding."""
        self._pager.carry_out(commands)
        if self.knows_requests:
            self._batch_slots.seat(commands.seating)
        else:
            self._slots.mark(tokens)

    def mark(self, requests: Sequence[str], tokens: np.ndarray) -> None:
        """Whose tokens the coming forward has, and how many of each."""
        self._batch_slots.mark(requests, tokens)

    def check(self) -> None:
        """Assert that every plane in use is what the host has; waits for the device. Fixed widths have no copies."""
        if self._pager is not None:
            self._pager.check()

    def bits(self) -> np.ndarray:
        """int64 (R,), committed widths as kernels see them, read from the device."""
        return self._weights.tables.bits.cpu().numpy()

    def read_signals(self, log_features: bool, kv_blocks: np.ndarray) -> Signals | None:
        """Merged by the KV blocks of each slot's requests, where they are known."""
        return self._signals.read(log_features=log_features, kv_blocks=kv_blocks if self.knows_requests else None)

    def _store(self, row: int, packed: PackedBlock, pages: torch.Tensor) -> None:
        """Keep on the host what the device may need again; nothing when widths are fixed."""
        if self._host is None:
            return
        for plane in range(self._weights.resident_width, len(pages)):
            self._host.store(row, plane, pages[plane])
        for bits in self._weights.upper_widths:
            self._host.store_table(row, bits, packed.tables[bits])

    def _allocate(self) -> None:
        layout, fixed = self.source.layout([share.shape for share in self._shares]), self._options.bits
        if fixed is not None and fixed not in layout.widths:
            raise ValueError(f"pagedweight.bits is {fixed}; these pages serve {layout.widths}")
        most_experts = max(len(share.experts) for share in self._shares)
        slots = 1 if fixed is not None else self._options.statistics_slots
        self._stats = RoutingStats.zeros(slots, len(self._shares), most_experts, self._device)
        self._signals = RankSignals(self._stats)
        self._batch_slots = BatchSlots(self._slots, self._stats)
        width, frame_bytes = fixed or layout.floor_width, self._frame_bytes(layout)
        self._weights = ResidentWeights(layout, width, frame_bytes, self._device, fixed=fixed is not None)
        if fixed is None:
            pinned = self._options.host_pinned_bytes if self._device.type == "cuda" else 0
            sizes = PageSizes.of(layout, self._weights.plane_frames, self._weights.frame_bytes)
            self._host = HostPages(sizes, pinned)

    def _frame_bytes(self, layout: Layout) -> int:
        if self._options.frame_bytes is not None:
            return self._options.frame_bytes
        if self._options.bits is not None:
            return choose_frame_bytes(layout.row_shapes())
        return choose_frame_bytes_for_kv(layout.row_shapes(), self._kv_piece_bytes())

    def _copies(self) -> FrameCopies:
        if self._device.type != "cuda":
            return HostFrameCopies(self._weights.frame_bytes)
        from pagedweight.integrations.vllm.frame_copies_cuda import CudaFrameCopies

        return CudaFrameCopies(self._weights.frame_bytes, self._device)
