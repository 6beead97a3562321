"""A model whose layers are on several GPUs: a runtime for each device, and one object that speaks for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagedweight.discovery_experts import ExpertsModule
from pagedweight.experts import PagedExperts
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection
from pagedweight.patching_model import NotCopied, PagedModel
from pagedweight.patching_quantize import Measured
from pagedweight.patching_sizes import KVLayers
from pagedweight.policy import Policy
from pagedweight.quant.levels import Stakes
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_report import RuntimeSnapshot, block_named
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.pager import Moves
from pagedweight.shared_experts import Folded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagedweight.integrations.hf_cache import ArenaCache
    from pagedweight.integrations.hf_hooks import Hooks
    from pagedweight.integrations.hf_spread_cache import SpreadCache


class Share(NamedTuple):
    """What of a model is on one device. layers: indices of its MoE layers, ascending. rows: int64, of its blocks."""

    device: torch.device
    layers: tuple[int, ...]
    rows: np.ndarray

    def layout(self, whole: Layout) -> Layout:
        return replace(whole, moe_layers=tuple(whole.moe_layers[index] for index in self.layers))

    def policy(self, whole: Policy) -> Policy:
        own = {name: getattr(whole, name)[self.rows] for name in ("blocks", "s_bar", "m_cal", "feature_center")}
        return whole.replaced(**own)

    def config(self, whole: RuntimeConfig, layout: Layout, number: int, shares: int) -> RuntimeConfig:
        """Bytes are each device's; of damage each may do its part; pins and traces are its own."""
        if shares == 1:
            return whole
        layers = {layer.layer for layer in self.layout(layout).moe_layers}
        return replace(
            whole,
            pinned_experts=tuple(pin for pin in whole.pinned_experts if pin[0] in layers),
            damage_limit=None if whole.damage_limit is None else whole.damage_limit / shares,
            trace_path=None if whole.trace_path is None else f"{whole.trace_path}.{number}",
        )


class OwnLayers:
    """Calibration of a whole model, asked by the layer index within a share."""

    def __init__(self, whole: Measured, share: Share) -> None:
        self._whole = whole
        self._layers = share.layers

    def importance(self, layer_index: int) -> tuple[Stakes, Stakes]:
        return self._whole.importance(self._layers[layer_index])

    def routing_mass(self, layer_index: int) -> torch.Tensor:
        return self._whole.routing_mass(self._layers[layer_index])


def shares_of(layout: Layout, devices: Sequence[torch.device]) -> list[Share]:
    """One share for each device, in the order of their first layers. devices: each MoE layer's."""
    shares = []
    for device in dict.fromkeys(devices):
        layers = tuple(index for index, own in enumerate(devices) if own == device)
        rows = [
            np.arange(layout.first_row(index), layout.first_row(index) + 2 * layout.moe_layers[index].experts)
            for index in layers
        ]
        shares.append(Share(device, layers, np.concatenate(rows)))
    return shares


def kv_of_shares(shares: Sequence[Share], layout: Layout, kv_layers: KVLayers) -> list[KVLayers]:
    """Each share's own layers of the cache, None in the places of others'.

    A layer without experts is with the next one below that has some, or else with the first.
    """
    owners = {layout.moe_layers[index].layer: n for n, share in enumerate(shares) for index in share.layers}
    owner_of: list[int] = []
    for number in range(len(kv_layers)):
        owner_of.append(owners.get(number, owner_of[-1] if owner_of else 0))
    return [
        [shapes if owner == n else None for shapes, owner in zip(kv_layers, owner_of, strict=True)]
        for n in range(len(shares))
    ]


class SpreadSlots:
    """The token slots of every device, written alike."""

    def __init__(self, parts: Sequence[PagedModel]) -> None:
        self._all = [part.slots for part in parts]

    def set(self, slots: torch.Tensor) -> None:
        for own in self._all:
            own.set(slots.to(own.view(1).device))

    def mark(self, tokens: int) -> None:
        for own in self._all:
            own.mark(tokens)

    def reset(self) -> None:
        for own in self._all:
            own.reset()

    def view(self, tokens: int) -> torch.Tensor:
        views = [own.view(tokens) for own in self._all]
        return views[0]


class SpreadModel(NotCopied):
    """What PagedModel is for one device, for several. budget_bytes is each device's; the cache of a layer is where the
    layer is, and every device's weights make room for their own layers' cache.

    kv: None, since no single arena holds the cache: `new_cache` gives one that is spread as the layers are.
    """

    kv = None
    replaced: Sequence[ExpertsModule] = ()
    folded: Sequence[Folded] = ()
    recipe: Mapping[str, str]
    hooks: Hooks

    def __init__(
        self, layout: Layout, policy: Policy, config: RuntimeConfig, shares: list[Share], parts: list[PagedModel]
    ) -> None:
        self.layout = layout
        self.policy = policy
        self.config = config
        self.parts = parts
        self.slots = SpreadSlots(parts)
        self._shares = shares
        self._place = {index: (n, at) for n, share in enumerate(shares) for at, index in enumerate(share.layers)}

    @property
    def closed(self) -> bool:
        return any(part.closed for part in self.parts)

    @property
    def max_requests(self) -> int:
        return self.config.max_requests

    def snapshot(self) -> RuntimeSnapshot:
        """All devices' figures together, and of the KV cache the device's with the least headroom."""
        return self._together([part.snapshot() for part in self.parts])

    def glance(self) -> RuntimeSnapshot:
        """As PagedModel.glance, of all devices together."""
        return self._together([part.glance() for part in self.parts])

    def _together(self, seen: list[RuntimeSnapshot]) -> RuntimeSnapshot:
        bits = np.empty(self.layout.rows, dtype=np.int64)
        for share, own in zip(self._shares, seen, strict=True):
            bits[share.rows] = own.bits
        weights = np.array([n * k for n, k in self.layout.row_shapes()], dtype=np.int64)
        return RuntimeSnapshot(
            step=seen[0].step,
            bytes_by_owner=_summed([own.bytes_by_owner for own in seen]),
            bytes_by_width=_summed([own.bytes_by_width for own in seen]),
            bits=bits,
            mean_bits=float((bits * weights).sum() / weights.sum()),
            kv=_tightest([own.kv for own in seen if own.kv is not None]),
            loading_bytes=sum(own.loading_bytes for own in seen),
            releasing_bytes=sum(own.releasing_bytes for own in seen),
            shortfall_bytes=sum(own.shortfall_bytes for own in seen),
            moves=Moves(*(sum(values) for values in zip(*(own.moves for own in seen), strict=True))),
        )

    def explain(
        self, layer: int | BlockId | None = None, expert: int | None = None, projection: Projection | str | None = None
    ) -> str:
        """As PagedModel.explain; without a linear-block, every device's own words."""
        if layer is None:
            told = zip(self._shares, self.parts, strict=True)
            return "\n".join(f"{share.device}: {part.explain()}" for share, part in told)
        block = layer if isinstance(layer, BlockId) else block_named(layer, expert, projection)
        return self._part_of_row(self.layout.row(block)).explain(block)

    def set_request(self, slot: int, *, confidence: float = 1.0, rho_bounds: tuple[float, float] | None = None) -> None:
        for part in self.parts:
            part.set_request(slot, confidence=confidence, rho_bounds=rho_bounds)

    def new_cache(self) -> SpreadCache:
        """An empty KV cache, each layer's in its own device's arena. ValueError without a budget."""
        from pagedweight.integrations.hf_spread_cache import SpreadCache

        return SpreadCache([part.new_cache() for part in self.parts])

    def set_bits(self, bits: np.ndarray | int) -> None:
        """As PagedModel.set_bits, with rows in the whole model's order."""
        bits = np.broadcast_to(bits, (self.layout.rows,))
        for share, part in zip(self._shares, self.parts, strict=True):
            with on_device(part):
                part.set_bits(bits[share.rows])

    @contextmanager
    def held_at(self, bits: np.ndarray | int) -> Iterator[None]:
        """As PagedModel.held_at, with rows in the whole model's order."""
        bits = np.broadcast_to(bits, (self.layout.rows,))
        with ExitStack() as held:
            for share, part in zip(self._shares, self.parts, strict=True):
                held.enter_context(part.held_at(bits[share.rows]))
            yield

    def boundary(self, pending_frames: Sequence[int] = (), cached_frames: Sequence[Sequence[int]] = ()) -> None:
        """Between two forwards, on every device; the figures are a SpreadCache's, device by device."""
        for n, part in enumerate(self.parts):
            with on_device(part):
                part.boundary(*(figures[n] for figures in (pending_frames, cached_frames) if figures))

    def before_forward(self, **inputs: object) -> None:
        """As PagedModel.before_forward."""
        self.hooks.forward.ahead((), inputs)

    def begin_requests(self, batch: int) -> None:
        for part in self.parts:
            part.begin_requests(batch)

    def forward_cache(self, cache: object) -> SpreadCache | None:
        """The cache if it lives in this model's arenas, None for any other kind; ValueError for another model's."""
        caches: Sequence[ArenaCache] = getattr(cache, "caches", [cache])
        whose = [part.forward_cache(own) for part, own in zip(self.parts, caches, strict=False)]
        return None if None in whose else cache

    def experts_for(self, layer_index: int, biases: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PagedExperts:
        n, at = self._place[layer_index]
        return self.parts[n].experts_for(at, biases, dtype)

    def blocks(self) -> Iterator[tuple[BlockId, PackedBlock]]:
        """Every linear-block as it was stored, in the whole model's row order."""
        for row, block in enumerate(self.layout.blocks()):
            yield block, self._part_of_row(row).store.load(block)

    def check(self) -> None:
        for part in self.parts:
            part.check()

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _part_of_row(self, row: int) -> PagedModel:
        return next(part for share, part in zip(self._shares, self.parts, strict=True) if row in share.rows)


def on_device(part: PagedModel) -> torch.cuda.device:
    """Launches and current streams are the part's device's; nothing on a CPU."""
    device = part.arena.memory.device
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _summed(accounts: list[dict]) -> dict:
    return {key: sum(account[key] for account in accounts) for key in accounts[0]}


def _tightest(states: list[KVState]) -> KVState | None:
    return min(states, key=lambda state: state.headroom_blocks * state.block_bytes, default=None)
