"""Continuous batching of transformers in the arena: requests take what expert weights give up (transformers >= 5.18).

A sector of its cache is a run of arena frames. Sectors that no request holds go back to the arena before each batch is
scheduled, and a request that needs one is asked for it there first: only when weights have nothing left to give does
transformers see a full cache, and evict.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.continuous_batching import cache as hf_cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler, Scheduler

from pagedweight.runtime.frames import OutOfFrames

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    from pagedweight.integrations.kv_sectors import KVSectors
    from pagedweight.patching_model import PagedModel

RESERVED_SECTORS = 2  # what transformers keeps for padding, at the front
# With it a config of layers that differ gives a figure for the whole model instead of an error.
WHOLE_MODEL_FIGURES = "allow_global_per_layer_attribute_access"


class SectorPool(CachePool):
    """Sectors that requests hold or may hold; the others are the arena's."""

    def __init__(self, sectors: KVSectors, allocators: int) -> None:
        self.sectors = sectors
        super().__init__(sectors.count, allocators)

    def reset(self) -> None:
        """Every sector goes back to the arena."""
        super().reset()
        self.sectors.give_all()
        self.free_sectors = []

    def lend(self, wanted: int) -> None:
        """See to it that `wanted` sectors are free, or as many as can be had."""
        try:
            while len(self.free_sectors) < wanted and self.sectors.held < self.sectors.most:
                self.free_sectors.append(self.sectors.take())
        except OutOfFrames:
            return

    def give_back(self) -> None:
        """Sectors that hold nothing go back to the arena."""
        self.try_to_free_sectors()
        self.sectors.give(self.free_sectors)
        self.free_sectors = []


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    """Launches go to the stream; None, as on a CPU, leaves them where they are."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class SectorCache(PagedAttentionCache):
    """transformers' cache once its sectors are lent by the arena.

    compute_stream: where batches run on a GPU, and so where pages move to make room for them.
    """

    pool: SectorPool
    compute_stream: torch.cuda.Stream | None = None

    def move_into(self, paged: PagedModel, most_blocks: int | None) -> None:
        """Take sectors of the arena instead of the memory that transformers has just allocated.

        most_blocks: blocks of all layers that requests may hold, in transformers' terms; None leaves it to the budget.
        """
        block_bytes = sum(allocator.bytes_per_block for allocator in self.cache_allocators.values())
        bytes_wanted = None if most_blocks is None else most_blocks * block_bytes
        unit = math.lcm(self.bytes_per_sector, paged.arena.frame_bytes)
        most = None if bytes_wanted is None else max(1, -(-bytes_wanted // unit))
        sectors = paged.lend_sectors(self.bytes_per_sector, RESERVED_SECTORS, most)
        sectors.abandoned_with(self)
        self.cache_tensor = sectors.memory
        self.bytes_per_sector, self.num_sectors = sectors.sector_bytes, sectors.count
        self.pool = SectorPool(sectors, len(self.cache_allocators))
        for allocator in self.cache_allocators.values():
            allocator.register_cache_tensor(
                self.bytes_per_sector, self.num_sectors * self.bytes_per_sector, self.cache_tensor, self.pool
            )
        per_sector = (one.tokens_per_page * one.blocks_per_sector for one in self.cache_allocators.values())
        self.tokens_per_sector = max(per_sector)
        self.num_blocks = sectors.most * self.bytes_per_sector // block_bytes
        self.max_tokens_read = sectors.most * self.tokens_per_sector

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """As in transformers; what is missing is asked of the arena first."""
        needed = sum(
            one.needs_new_sectors(state.request_id, state.current_len(), request_len)
            for one in self.cache_allocators.values()
        )
        if dry_run:
            return needed <= self.pool.num_free_sectors + self.pool.sectors.obtainable
        with on_stream(self.compute_stream), torch.inference_mode(False):
            self.pool.lend(needed)
        return super().can_store_request_tokens(state, request_len)

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Bytes, or the part of the whole, that requests could still have: weights' that they can give up are free."""
        free = super().compute_free_capacity(relative=False) + self.pool.sectors.obtainable * self.bytes_per_sector
        return free / (self.pool.sectors.most * self.bytes_per_sector) if relative else free


class ArenaScheduling(Scheduler):
    """Mixed into the scheduler that the user has chosen: the runtime's boundary comes before each batch."""

    cache: SectorCache
    paged: PagedModel

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple:
        with on_stream(self.cache.compute_stream), torch.inference_mode(False):
            self.cache.pool.give_back()
            self.paged.boundary()
        self.paged.hooks.forward.scheduled()
        return super().schedule_batch(token_budget, cache_budget)


def manager_in_arena(model: PreTrainedModel, paged: PagedModel, *args: Any, **kwargs: Any) -> ContinuousBatchingManager:
    """What the model's own init_continuous_batching gives, with its cache in the arena where there is a budget."""
    manager = type(model).init_continuous_batching(model, *args, **kwargs)
    manager._create_batch_processor = partial(processor_in_arena, weakref.ref(manager), weakref.ref(paged))
    return manager


def processor_in_arena(
    manager: weakref.ref[ContinuousBatchingManager], paged: weakref.ref[PagedModel]
) -> ContinuousBatchProcessor:
    """The manager's batch processor: a kept one, or a new one of transformers, with our cache and scheduler in it."""
    manager = manager()
    create = partial(type(manager)._create_batch_processor, manager)
    if manager.batch_processor is not None:
        return create()
    shapes = layers_of_their_own_shapes(manager.model.config.get_text_config())
    if paged().kv is None:
        with shapes:
            return create()
    config = manager.continuous_batching_config
    asked, blocks, name = config.scheduler_type, config.num_blocks, f"pagedweight-{id(manager)}"
    SCHEDULER_MAPPING[name] = partial(scheduler_in_arena, paged(), SCHEDULER_MAPPING.get(asked, FIFOScheduler), blocks)
    # One block: its memory is let go of as soon as the arena's has taken its place.
    config.scheduler_type, config.num_blocks = name, 1
    try:
        with shapes:
            processor = create()
    finally:
        del SCHEDULER_MAPPING[name]
        config.scheduler_type, config.num_blocks = asked, blocks
    processor.cache.compute_stream = processor.inputs_and_outputs.compute_stream
    if processor.model_device.type == "cuda":
        torch.cuda.current_stream(processor.model_device).synchronize()  # batches run on another stream
    return processor


def scheduler_in_arena(
    paged: PagedModel, kind: type[Scheduler], most_blocks: int | None, cache: PagedAttentionCache, **kwargs: Any
) -> Scheduler:
    """transformers calls this for its scheduler: the first moment that a cache exists, and the last before tensors are
    sized by it."""
    cache.__class__ = SectorCache
    cache.move_into(paged, most_blocks)
    paged.slots.view(cache.max_batch_tokens)  # captured graphs keep its address
    scheduler = type(f"Arena{kind.__name__}", (ArenaScheduling, kind), {})(cache=cache, **kwargs)
    scheduler.paged = paged
    return scheduler


@contextmanager
def layers_of_their_own_shapes(config: PreTrainedConfig) -> Iterator[None]:
    """While a cache is made: heads and head sizes are those of the layers, where these differ (Gemma 4)."""
    if not getattr(config, "is_heterogeneous", False):
        yield
        return
    whole = dict(hf_cache.ATTN_TYPE_TO_ALLOCATOR)
    allowed = vars(config).get(WHOLE_MODEL_FIGURES)
    hf_cache.ATTN_TYPE_TO_ALLOCATOR.update({name: of_own_shape(kind) for name, kind in whole.items()})
    vars(config)[WHOLE_MODEL_FIGURES] = True
    try:
        yield
    finally:
        hf_cache.ATTN_TYPE_TO_ALLOCATOR.update(whole)
        del vars(config)[WHOLE_MODEL_FIGURES]
        if allowed is not None:
            vars(config)[WHOLE_MODEL_FIGURES] = allowed


def of_own_shape(kind: type) -> type:
    """An allocator that takes its sizes from the layers it serves."""

    class OfOwnShape(kind):
        def __init__(self, config: PreTrainedConfig, layer_indices: list[int], **kwargs: Any) -> None:
            own = config.per_layer_config[layer_indices[0]]
            kwargs["num_key_value_heads"] = own.num_key_value_heads
            super().__init__(config=own, layer_indices=layer_indices, **kwargs)

    return OfOwnShape
