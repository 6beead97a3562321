"""One device's pages while a model is being patched: made from its dense weights, or read from a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.checkpoint import Checkpoint
from pagedweight.discovery_experts import ExpertsModule
from pagedweight.layout import Layout
from pagedweight.patching_devices import OwnLayers, Share
from pagedweight.patching_pages import PageStore, quantize_layer
from pagedweight.patching_quantize import Measured
from pagedweight.patching_sizes import KVLayers, Sizes, choose_sizes
from pagedweight.runtime.config import RuntimeConfig


class Filling(NamedTuple):
    """What is begun on one device. found: the experts there, in layer order; done: those whose weights are in pages."""

    share: Share
    config: RuntimeConfig
    store: PageStore
    sizes: Sizes
    found: list[ExpertsModule]
    done: list[ExpertsModule]

    @classmethod
    def begin(
        cls,
        share: Share,
        config: RuntimeConfig,
        kv_layers: KVLayers,
        layout: Layout,
        opened: Checkpoint | None,
        found: list[ExpertsModule],
    ) -> Filling:
        """Where pages will be kept and how large the arena is; layout and found are the whole model's."""
        own = share.layout(layout)
        sizes = choose_sizes(own, config, kv_layers)
        on_cuda = share.device.type == "cuda"
        mapped = opened if on_cuda or config.host_pinned_bytes is not None else None
        store = PageStore(own, sizes.frame_bytes, config.host_pinned_bytes if on_cuda else 0, mapped)
        return cls(share, config, store, sizes, [found[index] for index in share.layers], [])

    def quantize(self, keep: bool, level: str, calibration: Measured | None) -> np.ndarray:
        """Layer by layer, dropping each layer's dense weights unless they are kept; returns s_bar, (R, W)."""
        measured = None if calibration is None else OwnLayers(calibration, self.share)
        s_bar = []
        for index, experts in enumerate(self.found):
            stakes = None if measured is None else measured.importance(index)
            layer = quantize_layer(experts, self.store.layout, level=level, stakes=stakes)
            for block, packed in layer.blocks:
                self.store.store(block, packed)
            s_bar.append(layer.s_bar)
            self.done.append(experts)
            if not keep:
                experts.drop_weights()
        return np.concatenate(s_bar)

    def read(self, opened: Checkpoint, keep: bool) -> None:
        """Every page, and then drop the dense weights unless they are kept."""
        for block in self.store.layout.blocks():
            self.store.store(block, opened.block(block))
        self.done.extend(experts for experts in self.found if experts.has_weights)
        if not keep:
            for experts in self.found:
                experts.drop_weights()
