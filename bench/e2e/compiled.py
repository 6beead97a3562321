"""Decoder layers through torch.compile, one graph for all of them."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Let torch.compile fuse what is small in every decoder layer, for the batch that comes next.

    What was compiled before is forgotten (not what Inductor keeps on disk): sizes stay constants, as where each batch
    size has a CUDA graph of its own.
    """
    torch._dynamo.reset()
    counters.clear()
    # Paged experts know their layer by number: a second graph takes it as an input, instead of one for each layer.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for layer in model.model.layers:
        layer.compile(backend=backend)


def compilation() -> dict[str, int]:
    """Since then: graphs for all layers together, and breaks in them."""
    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}
