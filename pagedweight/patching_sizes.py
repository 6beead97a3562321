"""How large the arena and its frames must be, and whether a budget suffices, before anything is built."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from pagedweight.integrations.kv_pool import SlabShape, sequence_frames
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry
from pagedweight.layout import Layout
from pagedweight.patching_pages import page_sizes
from pagedweight.runtime.config import FRAME_ALIGNMENT_BYTES, RuntimeConfig

KVLayers = list[tuple[SlabShape, SlabShape] | None]


class Sizes(NamedTuple):
    """arena_bytes: device bytes in whole frames. kv_layers: what each layer caches, empty when KV stays outside."""

    arena_bytes: int
    frame_bytes: int
    kv_layers: KVLayers


def choose_sizes(layout: Layout, config: RuntimeConfig, kv_layers: KVLayers) -> Sizes:
    """The arena for a layout: the budget, or without one exactly what the parent width takes.

    ValueError when the budget cannot hold every linear-block at the floor width and beside them one sequence of a KV
    block's tokens: with less, not even that could be generated.
    """
    frame_bytes = config.frame_bytes or _frame_bytes(layout, kv_layers)
    resident = resident_bytes(layout, frame_bytes).sum(axis=0)
    if config.budget_bytes is None:
        return Sizes(int(resident[-1]), frame_bytes, [])
    sequence = max(1, sequence_frames(kv_layers, frame_bytes, config.block_tokens)) * frame_bytes
    least = int(resident[0]) + sequence
    if config.budget_bytes < least:
        raise ValueError(
            f"budget_bytes is {config.budget_bytes}; expert weights at {layout.floor_width} bits take {resident[0]} "
            f"and the KV cache of one sequence of {config.block_tokens} tokens {sequence}, so give at least {least}"
        )
    return Sizes(config.budget_bytes // frame_bytes * frame_bytes, frame_bytes, kv_layers)


def resident_bytes(layout: Layout, frame_bytes: int | None = None) -> np.ndarray:
    """int64 (R, W), M_i^b of every row in whole frames, by default of the bytes that suit the planes best."""
    frame_bytes = frame_bytes or _frame_bytes(layout, [])
    return page_sizes(layout, [plane_geometry(n, k, frame_bytes) for n, k in layout.row_shapes()]).resident_bytes()


def warn_unless_smaller(paged_bytes: int, dense_bytes: int) -> None:
    """One warning where paging saves nothing. paged_bytes: at the parent width, where every model starts that may."""
    if paged_bytes >= dense_bytes:
        warnings.warn(
            f"expert weights take {paged_bytes} bytes at the largest width, no less than the {dense_bytes} they took "
            "before: their rows are short beside their tables; quantize to smaller widths",
            stacklevel=5,  # whoever called patch or load
        )


def _frame_bytes(layout: Layout, kv_layers: KVLayers) -> int:
    """Best for the planes, unless one token of K or V would not fit."""
    tokens = [shape.token_bytes for pair in kv_layers if pair is not None for shape in pair]
    token = -(-max(tokens, default=0) // FRAME_ALIGNMENT_BYTES) * FRAME_ALIGNMENT_BYTES
    return max(choose_frame_bytes(layout.row_shapes()), token)


def kv_layers_of(model: nn.Module, experts: Sequence[nn.Module]) -> KVLayers:
    """What each layer of the model caches, from a forward over one token in which experts are passed by."""
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model that generates, so its KV cache cannot share a "
            "budget; patch it without budget_bytes"
        )
    from pagedweight.integrations.hf_probe import probe_shapes

    with passed_by(experts):
        return probe_shapes(model)


@contextmanager
def passed_by(experts: Sequence[nn.Module]) -> Iterator[None]:
    """Experts return their input: shapes and caches of the rest are as ever, and weights need not be there."""
    # A module may carry a forward of its own already, such as one that a hook was wrapped around.
    own = [module.__dict__.get("forward") for module in experts]
    for module in experts:
        module.forward = _first
    try:
        yield
    finally:
        for module, forward in zip(experts, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _first(hidden_states: torch.Tensor, *args: object) -> torch.Tensor:
    return hidden_states
