"""What each layer of a model caches, seen in its own cache: the shapes of one token's keys and values."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from pagedweight.integrations.kv_places import SlabShape


def probe_shapes(model: PreTrainedModel) -> list[tuple[SlabShape, SlabShape] | None]:
    """(K shape, V shape) of every layer of the model's own cache, None where a layer keeps nothing of its own.

    Found by a forward over one token. ValueError when a layer keeps something else than keys and values.
    """
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True, **{name: cache})
    return [layer_shapes(number, layer) for number, layer in enumerate(cache.layers)]


def layer_shapes(number: int, layer: CacheLayerMixin) -> tuple[SlabShape, SlabShape] | None:
    """What one layer of a DynamicCache has stored."""
    if type(layer).__name__ == "DummyLayer":
        return None
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ValueError(
            f"layer {number} keeps a {type(layer).__name__}, and only full and sliding-window attention can share the "
            "budget; patch without budget_bytes and use the model's own cache"
        )
    if layer.keys is None:
        return None
    return tuple(SlabShape(t.shape[1], t.shape[3], t.dtype) for t in (layer.keys, layer.values))
