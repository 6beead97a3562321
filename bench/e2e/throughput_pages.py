"""The models that bench/e2e/throughput.py measures, emptied of their experts, and the kinds of pages it gives them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from bench.e2e.captured import WHOLE_CACHE
from bench.e2e.drawn import Drawn, dense_model, emptied
from bench.e2e.throughput_peers import GROUPED, register_peers
from pagedweight.shared_experts import fold_shared_experts

BUFFER_BYTES = 2**30
FAST = {3: "lut8", 4: "lut8", 5: "affine", 6: "affine"}
# Widths of a checkpoint and their codebooks, lut16 where none is given.
PAGES = {
    "lut16": ((3, 4, 5, 6), {}),
    "lut16 from 2 bits": ((2, 3, 4, 5, 6), {}),
    "fast": ((3, 4, 5, 6), FAST),
    "fast from 2 bits": ((2, 3, 4, 5, 6), FAST | {2: "lut8"}),
}


def drawn_of(model: PreTrainedModel, codebooks: str, *, shared: bool) -> Drawn:
    """shared: the shared expert is paged with the routed ones."""
    if shared:
        model.set_experts_implementation(register_peers()[GROUPED])  # one that computes: folding checks its answer
        fold_shared_experts(model)
    device = model.device
    drawn = emptied(model, PAGES[codebooks][0], buffer_bytes(device), PAGES[codebooks][1])
    if device.type == "cuda":
        # A model that is loaded without experts has no holes where they were: to the host and back.
        model.cpu()
        torch.cuda.empty_cache()
        model.to(device)
    return drawn


def one_layer(name: str, codebooks: str, device: str, *, shared: bool) -> Drawn:
    """A model of one layer, which compiles and is checked in little time."""
    drawn = drawn_of(dense_model(name, 1, device), codebooks, shared=shared)
    drawn.model.set_attn_implementation(WHOLE_CACHE)
    return drawn


def other_pages(drawn: Drawn, codebooks: str) -> Drawn:
    return drawn.with_pages(*PAGES[codebooks], buffer_bytes(drawn.model.device))


def buffer_bytes(device: torch.device) -> int:
    return BUFFER_BYTES if device.type == "cuda" else 0
