"""A transformers Cache whose keys and values live in the arena, beside the expert weights."""

from __future__ import annotations

import weakref

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from pagedweight.integrations.hf_cache_layers import ArenaLayer, arena_layer
from pagedweight.integrations.kv_pool import KVPool
from pagedweight.integrations.kv_slab import Span, grow, missing_frames
from pagedweight.runtime.interrupts import InterruptsHeld


class ArenaCache(Cache):
    """Past keys and values of a batch, in frames of the pool's arena.

    Use: model.generate(..., past_key_values=model.pagedweight.new_cache()). The frames come back with reset(),
    release(), or when the last reference to the cache is dropped.
    """

    def __init__(self, pool: KVPool, config: PreTrainedConfig) -> None:
        self._pool = pool
        self._holdings = pool.new_holdings()
        # transformers 5.9 makes no layers where `num_kv_shared_layers` is 0, and takes full ones as they come.
        own = DynamicCache(config=config).layers or [DynamicLayer() for _ in pool.layers]
        if len(own) != len(pool.layers):
            raise ValueError(f"the pool knows {len(pool.layers)} cached layers and the model's config {len(own)}")
        layers = [
            like if shapes is None else arena_layer(like, pool, self._holdings, shapes)
            for like, shapes in zip(own, pool.layers, strict=True)
        ]
        super().__init__(layers=layers)
        self._config = config
        weakref.finalize(self, pool.abandon, self._holdings).atexit = False

    def __deepcopy__(self, memo: dict) -> ArenaCache:
        """A cache with the same tokens in frames of its own. Raises OutOfFrames."""
        copy = memo[id(self)] = ArenaCache(self._pool, self._config)
        for own, other in zip(self._arena_layers(), copy._arena_layers(), strict=True):
            other.copy_from(own)
        return copy

    @property
    def held_bytes(self) -> int:
        """Arena bytes that this cache holds: the sum over layers of what is there, in whole frames."""
        return self._holdings.frames * self._pool.arena.frame_bytes

    def frames_by_sequence(self, batch: int) -> list[int]:
        """Arena frames that each sequence of the batch holds. ValueError for a batch of none."""
        if batch < 1:
            raise ValueError("the batch has no sequence; give at least one")
        return [self._holdings.frames // batch] * batch

    def belongs_to(self, pool: KVPool) -> bool:
        return self._pool is pool

    def missing_frames(self, batch: int, tokens: int) -> int:
        """Frames that a forward over (batch, tokens) new tokens will take."""
        return missing_frames(self._spans(batch, tokens), batch)

    def reserve(self, batch: int, tokens: int) -> None:
        """Take those frames now, so that nothing is allocated inside the forward. Raises OutOfFrames."""
        grow(self._pool, self._holdings, self._spans(batch, tokens), batch)

    def reset(self) -> None:
        """Forget every token and give every frame back, all at once."""
        with InterruptsHeld():
            for layer in self.layers:
                if isinstance(layer, ArenaLayer):
                    layer.forget()
                else:
                    layer.reset()
            self._holdings.give_all()

    def release(self) -> None:
        """The same."""
        self.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        with InterruptsHeld():  # or some layers would be in the old order
            super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        with InterruptsHeld():
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times. Raises OutOfFrames, and the cache is as it was."""
        with InterruptsHeld():
            self._pool.make_free((repeats - 1) * self._holdings.frames)
            super().batch_repeat_interleave(repeats)

    def _spans(self, batch: int, tokens: int) -> list[Span]:
        """What a forward writes where there is no room yet. ValueError when it does not fit what the cache holds."""
        spans, layers = [], self._arena_layers()
        lengths = [layer.get_seq_length() for layer in layers]
        for layer, length in zip(layers, lengths, strict=True):
            if length != lengths[0] or layer.torn:
                raise ValueError(
                    f"the cache holds {min(lengths)} tokens in some layers and {max(lengths)} in others, since a "
                    "forward or a change of the batch ended half-way; reset() it or make a new cache with new_cache()"
                )
            layer.check_batch(batch)
            if not layer.has_room(tokens):
                spans += layer.growth(tokens)
        return spans

    def _arena_layers(self) -> list[ArenaLayer]:
        """Layers that hold a cache; a layer that shares another's keeps the model's own empty object."""
        return [layer for layer in self.layers if isinstance(layer, ArenaLayer)]
