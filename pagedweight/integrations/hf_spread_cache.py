"""A KV cache whose layers live in several arenas, each on its layer's device."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from transformers.cache_utils import Cache

from pagedweight.integrations.hf_cache import ArenaCache
from pagedweight.integrations.hf_cache_layers import ArenaLayer


class SpreadCache(Cache):
    """Each layer is that of the one cache whose arena holds it. caches: device by device."""

    def __init__(self, caches: Sequence[ArenaCache]) -> None:
        self.caches = list(caches)
        in_arena = [[layer for layer in same if isinstance(layer, ArenaLayer)] for same in self._by_layer()]
        # A layer that shares another's cache is in none, and stays the model's own empty object.
        layers = [own[0] if own else same[0] for own, same in zip(in_arena, self._by_layer(), strict=True)]
        super().__init__(layers=layers)

    def __deepcopy__(self, memo: dict) -> SpreadCache:
        """A cache with the same tokens in frames of its own. Raises OutOfFrames."""
        memo[id(self)] = made = SpreadCache([copy.deepcopy(cache, memo) for cache in self.caches])
        return made

    @property
    def held_bytes(self) -> int:
        """Bytes that this cache holds on all devices."""
        return sum(cache.held_bytes for cache in self.caches)

    def missing_frames(self, batch: int, tokens: int) -> list[int]:
        """Frames that a forward over (batch, tokens) new tokens will take, device by device."""
        return [cache.missing_frames(batch, tokens) for cache in self.caches]

    def frames_by_sequence(self, batch: int) -> list[list[int]]:
        """Frames that each sequence of the batch holds, device by device."""
        return [cache.frames_by_sequence(batch) for cache in self.caches]

    def reserve(self, batch: int, tokens: int) -> None:
        """Take what a forward will write. Raises OutOfFrames."""
        for cache in self.caches:
            cache.reserve(batch, tokens)

    def release(self) -> None:
        """Forget every token and give every frame back."""
        self.reset()

    def _by_layer(self) -> list[tuple]:
        return list(zip(*(cache.layers for cache in self.caches), strict=True))
