"""What a patched model carries as `model.pagedweight`: its runtime, its pages, and where its KV caches come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from pagedweight.discovery_experts import ExpertsModule
from pagedweight.experts import PagedExperts, TokenSlots
from pagedweight.integrations.hf_hooks import Hooks
from pagedweight.integrations.kv_pool import KVPool
from pagedweight.integrations.kv_sectors import KVSectors
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection, RoutingStats
from pagedweight.patching_pages import PageStore
from pagedweight.patching_sizes import Sizes
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.controller_report import RuntimeSnapshot
from pagedweight.runtime.frames import Arena, OutOfFrames
from pagedweight.runtime.kv import ArenaGauge
from pagedweight.runtime.observe import forecast_blocks
from pagedweight.runtime.transfer import ImmediateEngine, TransferEngine
from pagedweight.shared_experts import Folded

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pagedweight.integrations.hf_cache import ArenaCache


class NotCopied:
    """What holds the runtime's memory: neither copied nor pickled."""

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a patched model cannot be copied or pickled: its weights live in the runtime's memory; "
            "use pagedweight.save and pagedweight.load, or unpatch the model first"
        )


class PagedModel(NotCopied):
    """The runtime of one patched model, or of what one device holds of it.

    layout: its linear-blocks in table-row order. kv: where its caches take frames, None without budget_bytes.
    stats: what the kernels count. slots: which request slot each token of the next forward belongs to.
    recipe: what the pages were made from, as Checkpoint.recipe. replaced: the experts modules that stood in the model.
    folded: shared experts that are among them.
    hooks: call the boundary before each of its forwards.
    """

    replaced: Sequence[ExpertsModule] = ()
    folded: Sequence[Folded] = ()
    recipe: Mapping[str, str] = MappingProxyType({})
    hooks: Hooks
    closed = False

    def __init__(
        self,
        store: PageStore,
        sizes: Sizes,
        policy: Policy,
        config: RuntimeConfig,
        device: torch.device,
        model_config: PreTrainedConfig | None = None,
    ) -> None:
        self.store = store
        self.policy = policy
        self.config = config
        self.arena = Arena(sizes.arena_bytes, sizes.frame_bytes, device)
        most_experts = max(layer.experts for layer in self.layout.moe_layers)
        self.stats = RoutingStats.zeros(config.max_requests, len(self.layout.moe_layers), most_experts, device)
        self.slots = TokenSlots(device=device)
        self.kv = KVPool(self.arena, sizes.kv_layers, config.block_tokens) if sizes.kv_layers else None
        gauge = ArenaGauge(self.arena, self.kv.block_frames) if self.kv else None
        engine = _engine(self.arena, config)
        self._runtime = Runtime(self.layout, store.host, self.arena, policy, config, engine, gauge, self.stats)
        if self.kv is not None:
            self.kv.draw_on(self._runtime)
            self._runtime.follow_kv(self.kv.follow)
        self._model_config = model_config

    @property
    def layout(self) -> Layout:
        return self.store.layout

    @property
    def parts(self) -> list[PagedModel]:
        """What is on each device: here, all on one."""
        return [self]

    def snapshot(self) -> RuntimeSnapshot:
        """Bytes held by planes, tables and KV, committed widths and moves, as values."""
        self._collect()
        return self._runtime.snapshot()

    def glance(self) -> RuntimeSnapshot:
        """snapshot() for another thread than the one that runs the model: waits for its boundary and frees nothing."""
        return self._runtime.snapshot()

    def explain(
        self, layer: int | BlockId | None = None, expert: int | None = None, projection: Projection | str | None = None
    ) -> str:
        """Why a linear-block ("gate_up" or "down" of an expert, in the model's own numbers) has its width, what that
        cost, and what 1 GiB more would free or restore; without one, what the runtime is doing and why. KeyError for
        one that the model does not have."""
        return self._runtime.explain(layer, expert, projection)

    def set_request(self, slot: int, *, confidence: float = 1.0, rho_bounds: tuple[float, float] | None = None) -> None:
        """How far the prompt residuals of the request in a slot are trusted (0 to 1), and their clipping bounds, until
        another request comes into the slot. ValueError for a slot that there is not."""
        self._runtime.set_request(slot, confidence=confidence, rho_bounds=rho_bounds)

    def new_cache(self) -> ArenaCache:
        """An empty KV cache in this model's arena, for model.generate(..., past_key_values=...). ValueError without a
        budget, since the arena then has no room for it."""
        from pagedweight.integrations.hf_cache import ArenaCache

        if self.kv is None:
            raise ValueError(
                "the model was patched without budget_bytes, so its arena holds expert weights only; "
                "patch with RuntimeConfig(budget_bytes=...) to keep the KV cache beside them"
            )
        return ArenaCache(self.kv, self._model_config)

    def lend_sectors(self, unit_bytes: int, reserved: int, most: int | None = None) -> KVSectors:
        """Runs of frames for an engine that knows its KV blocks by number, as KVSectors has them.

        Widths fall to the floor and come back, so that the reserved sectors stand right behind the tables of the floor.
        """
        self._collect()
        before = self._runtime.snapshot().bits
        self._runtime.set_bits(self.layout.floor_width)
        try:
            return KVSectors(self.kv, unit_bytes, reserved, most)
        except OutOfFrames as error:
            raise ValueError(f"the budget is too small for continuous batching: {error}") from error
        finally:
            with suppress(OutOfFrames):  # with less room than before, those that fit
                self._runtime.set_bits(before)

    def set_bits(self, bits: np.ndarray | int) -> None:
        """Bring every linear-block to a width now; later boundaries may change it again.

        bits: one width, or an integer for each row, (R,) in layout order.
        ValueError for an unsupported width; OutOfFrames when the arena cannot hold them.
        """
        self._collect()
        # From the floor, so that no row's old table needs room beside its new one: a full arena has none.
        self._runtime.set_bits(self.layout.floor_width)
        self._runtime.set_bits(bits)

    @contextmanager
    def held_at(self, bits: np.ndarray | int) -> Iterator[None]:
        """set_bits, and no boundary changes a width until the block is left."""
        with self._runtime.paused():
            self.set_bits(bits)
            yield

    def boundary(self, pending_frames: int = 0, cached_frames: Sequence[int] = ()) -> None:
        """Between two forwards.

        pending_frames: what the coming one will take for its keys and values. cached_frames: what each sequence of its
        batch holds already, for a cache in this arena.
        """
        self._collect()
        if self.kv is None:
            self._runtime.boundary()
            return
        growth_tokens = self.config.forecast_tokens * len(cached_frames)
        self._runtime.boundary(
            self.kv.blocks(pending_frames),
            forecast_blocks=forecast_blocks(growth_tokens, 0, 0, self.config.block_tokens),
            request_kv=self._by_slot(cached_frames),
        )

    def before_forward(self, **inputs: object) -> None:
        """Call the boundary of the coming forward now, with its own arguments; the forward will not.

        For a forward that is compiled with fullgraph=True. generate() does this itself.
        """
        self.hooks.forward.ahead((), inputs)

    @property
    def max_requests(self) -> int:
        """Request slots; a batch's row numbers modulo this are its slots."""
        return self.config.max_requests

    def begin_requests(self, batch: int) -> None:
        """New sequences come into the slots of a batch: what was counted there is another request's."""
        for counted in self.stats:
            counted[:batch].zero_()
        self._runtime.begin_requests(batch)

    def _by_slot(self, of_rows: Sequence[int]) -> np.ndarray | None:
        """float32 (R_s,), a batch's figures summed by request slot, None when there is nothing."""
        if not any(of_rows):
            return None
        slots = np.arange(len(of_rows)) % self.max_requests
        return np.bincount(slots, of_rows, self.max_requests).astype(np.float32)

    def forward_cache(self, cache: object) -> ArenaCache | None:
        """The cache if it lives in this model's arena, None for any other kind; ValueError for another model's."""
        belongs_to = getattr(cache, "belongs_to", None)
        if belongs_to is None:
            return None
        if self.kv is None or not belongs_to(self.kv):
            raise ValueError("the cache lives in another model's arena; make one with this model's new_cache()")
        return cache

    def experts_for(
        self, layer_index: int, biases: Mapping[str, torch.Tensor], dense_dtype: torch.dtype
    ) -> PagedExperts:
        """The drop-in for one MoE layer whose dense weights had dense_dtype."""
        return PagedExperts(
            self.layout.moe_layers[layer_index],
            layer_index,
            self.layout.first_row(layer_index),
            self._runtime.tables,
            self.stats,
            self.slots,
            frame_bytes=self.arena.frame_bytes,
            widths=self.layout.widths,
            codebooks=self.layout.codebooks,
            biases=biases,
            dense_dtype=dense_dtype,
        )

    def check(self) -> None:
        """Assert the invariants of arena and page table."""
        self._collect()
        self._runtime.check()

    def close(self) -> None:
        """Finish what is in flight and give host memory back. The model still answers, at the widths that it has;
        nothing can be moved, saved or unpatched afterwards, unless the original weights were kept."""
        self._collect()
        self._runtime.close()
        self.closed = True

    def blocks(self) -> Iterator[tuple[BlockId, PackedBlock]]:
        """Every linear-block as it was stored, in row order."""
        return self.store.blocks()

    def _collect(self) -> None:
        if self.kv is not None:
            self.kv.collect()


def _engine(arena: Arena, config: RuntimeConfig) -> TransferEngine:
    if arena.memory.device.type == "cuda":
        from pagedweight.runtime.transfer_cuda import CudaEngine

        return CudaEngine(arena, batched=config.batched_copies)
    return ImmediateEngine(arena)
