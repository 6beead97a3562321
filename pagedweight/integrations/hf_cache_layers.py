"""The layers of an ArenaCache: keys and values of one attention layer, in frames of the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from pagedweight.integrations.kv_places import SlabShape
from pagedweight.integrations.kv_pool import FrameHoldings, KVPool
from pagedweight.integrations.kv_slab import Slab, Span, grow


class ArenaLayer(CacheLayerMixin):
    """K and V of one full-attention layer. A sequence's frames are taken as it grows into them."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, pool: KVPool, holdings: FrameHoldings, shapes: tuple[SlabShape, SlabShape]) -> None:
        super().__init__()
        self.is_initialized = True
        self._pool = pool
        self._holdings = holdings
        self._shapes = shapes
        self._slabs = tuple(Slab(pool.places(shape), holdings) for shape in shapes)
        self._both: tuple[torch.Tensor | None, ...] = None, None, None
        self._seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the shapes were known when the cache was made."""

    def growth(self, tokens: int) -> list[Span]:
        """What a forward over `tokens` new tokens writes, to K and to V."""
        stop = self._seen + tokens
        return [Span(slab, stop - self._kept(tokens), stop) for slab in self._slabs]

    def has_room(self, tokens: int) -> bool:
        """Whether that can be written as things are."""
        keys, values = self._slabs
        return keys.has_room(self._seen + tokens) and values.has_room(self._seen + tokens)

    @property
    def torn(self) -> bool:
        """Whether something ended between the tokens' keys, their values and their count. A reservation has neither."""
        keys, values = self._slabs
        if keys.stop == values.stop == self._seen:
            return False
        return self._seen > 0 or keys.start < keys.stop or values.start < values.stop

    def check_batch(self, batch: int) -> None:
        """ValueError when tokens of another number of sequences are held."""
        for slab in self._slabs:
            if slab.start < slab.stop and slab.batch != batch:
                raise ValueError(
                    f"the cache holds {slab.batch} sequences and got {batch}; "
                    "reset() it or make a new cache with new_cache()"
                )

    @torch.compiler.disable(reason="a KV slab takes arena frames as it grows: compile without fullgraph")
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store K and V (B, heads, S, head_dim); returns those that attention may see, new ones last."""
        self._check(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        kept = self._kept(tokens)
        if not self.has_room(tokens):
            grow(self._pool, self._holdings, self.growth(tokens), batch)
        for slab, states in zip(self._slabs, (key_states, value_states), strict=True):
            slab.write(states if kept == tokens else states[:, :, tokens - kept :])
        fresh = self._seen == 0
        self._seen += tokens
        seen = (key_states, value_states) if fresh else self._visible(tokens)
        self._shrink()
        return seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen + query_length, 0

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def reset(self) -> None:
        """Forget every token and give the frames back to the arena."""
        for slab in self._slabs:
            slab.clear()
        self._seen = 0

    def forget(self) -> None:
        """As reset, and somebody else gives the frames back."""
        for slab in self._slabs:
            slab.forget()
        self._seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens; a positive number is the length to keep, as transformers had it."""
        change = int(tokens_to_remove)  # assisted decoding passes a tensor
        removed = -change if change <= 0 else max(0, self._seen - change)
        if removed:
            self._remove(min(removed, self._seen))
        self._shrink()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self._seen:
            for slab in self._slabs:
                slab.permute(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._rebuild(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences named by indices."""
        self._rebuild(lambda states: states[indices, ...])

    def copy_from(self, other: ArenaLayer) -> None:
        """Take over the tokens of another cache's layer; this one must be empty. Raises OutOfFrames."""
        if other._seen:
            places = [(slab.start, slab.stop) for slab in other._slabs]
            self._store([slab.read() for slab in other._slabs], places)
            self._seen = other._seen

    def _kept(self, tokens: int) -> int:
        """How many of `tokens` new tokens are stored."""
        return tokens

    def _visible(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(0)

    def _read(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V from the token number `first` on, where they are alike by one launch for both."""
        keys, values = self._slabs
        if keys.places is not values.places:
            return keys.read(first), values.read(first)
        if self._both[0] is not keys.index or self._both[1] is not values.index:
            self._both = keys.index, values.index, torch.cat([keys.index, values.index])
        gathered = keys.places.gather(self._both[2])
        return keys.part_of(gathered, 0, first), values.part_of(gathered, len(keys.index), first)

    def _shrink(self) -> None:
        """Give back what no later token can see."""

    def _remove(self, tokens: int) -> None:
        self._seen -= tokens
        for slab in self._slabs:
            slab.drop_from(self._seen)

    def _rebuild(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the stored batch by change(K or V); the old frames are given back first."""
        if not self._seen:
            return
        states = [change(slab.read()) for slab in self._slabs]
        places = [(slab.start, slab.stop) for slab in self._slabs]
        for slab in self._slabs:
            slab.clear()
        self._store(states, places)

    def _store(self, states: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> None:
        """Fill the empty slabs with K and V (B, heads, tokens, head_dim) at token numbers [start, stop)."""
        spans = [Span(slab, *place) for slab, place in zip(self._slabs, places, strict=True)]
        grow(self._pool, self._holdings, spans, states[0].shape[0])
        for slab, new in zip(self._slabs, states, strict=True):
            slab.write(new)

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for shape, states in zip(self._shapes, (key_states, value_states), strict=True):
            heads, head_dim, dtype = shape
            if states.size(1) != heads or states.size(3) != head_dim or states.dtype != dtype:
                got = SlabShape(states.shape[1], states.shape[3], states.dtype)
                raise ValueError(
                    f"keys or values are {got} and the budget was laid out for {shape}; bring the model into its dtype "
                    "before it is patched"
                )
        self.check_batch(key_states.shape[0])


class ArenaSlidingLayer(ArenaLayer):
    """K and V of a sliding-window layer: holds the last window - 1 tokens; older frames go back to the arena."""

    is_sliding = True

    def __init__(
        self, pool: KVPool, holdings: FrameHoldings, shapes: tuple[SlabShape, SlabShape], window_tokens: int
    ) -> None:
        super().__init__(pool, holdings, shapes)
        self._past = window_tokens - 1
        self._record = False

    def activate_past_recording(self) -> None:
        """Keep every token until the next crop(), which may then go back behind the window."""
        self._record = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = min(self._seen, self._past)
        return past + query_length, self._seen - past

    def get_max_length(self) -> int:
        return self._past + 1

    def crop(self, tokens_to_remove: int) -> None:
        """As in ArenaLayer; past the window only with activate_past_recording()."""
        if tokens_to_remove and self._seen > self._past and not self._record:
            raise RuntimeError(
                f"crop({tokens_to_remove}) goes back behind a sliding window that has dropped older tokens; "
                "call activate_past_recording() first"
            )
        recording, self._record = self._record, False
        super().crop(tokens_to_remove)
        self._record = recording

    def _kept(self, tokens: int) -> int:
        # With a past, all are stored and then cut, so that attention can read one run of tokens.
        return min(tokens, self._past) if self._seen == 0 and not self._record else tokens

    def _visible(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(self._seen - self._past - tokens)

    def _shrink(self) -> None:
        if not self._record:
            for slab in self._slabs:
                slab.drop_before(self._seen - self._past)


def arena_layer(
    like: CacheLayerMixin, pool: KVPool, holdings: FrameHoldings, shapes: tuple[SlabShape, SlabShape]
) -> ArenaLayer:
    """The arena's counterpart of one of the model's own cache layers."""
    if isinstance(like, DynamicSlidingWindowLayer):
        return ArenaSlidingLayer(pool, holdings, shapes, like.sliding_window)
    return ArenaLayer(pool, holdings, shapes)
