"""Compiles a patched model's kernels before it serves: otherwise every batch size stops the first time it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pagedweight.experts import PagedExperts

# One, a few and many tokens of a decode step, and a prompt's: each takes kernels of its own.
BATCHES = (1, 2, 16, 64, 512)


def compile_kernels(
    model: nn.Module,
    batches: Sequence[int] = BATCHES,
    *,
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> int:
    """Compile, side by side on eight threads, the products that batches of these many tokens launch; returns how many.

    model: patched. One forward of one token tells what its routers hand over (how many experts, in which types), so
    that nothing has to be said; statistics are left as they were. Without CUDA, 0: there is nothing to compile. Small
    kernels beside the products, and whatever else the model launches, still compile as they come.
    progress: called with (step, kernels compiled, kernels to compile), anew for each shape of experts.
    ValueError for a model that is not patched.
    """
    experts = [module for module in model.modules() if isinstance(module, PagedExperts)]
    if not experts:
        raise ValueError(f"this {type(model).__name__} has no paged experts; patch it first")
    if not experts[0].tables.bits.is_cuda:
        return 0
    # Not at the top: it needs Triton.
    from pagedweight.kernels import compiling

    compiled: list[int] = []

    def compile_layer(layer: PagedExperts, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        call = layer.call(*inputs, **named)
        compiled.append(compiling.compile_kernels(call, batches, partial(progress, "compiling")))

    handles = [layer.register_forward_pre_hook(compile_layer, with_kwargs=True) for layer in _of_each_shape(experts)]
    kept = [(tensor, tensor.clone()) for layer in experts for tensor in layer.stats]
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=experts[0].tables.bits.device))
    finally:
        for handle in handles:
            handle.remove()
        for tensor, before in kept:
            tensor.copy_(before)
    return sum(compiled)


def _of_each_shape(experts: list[PagedExperts]) -> list[PagedExperts]:
    """One layer for every kernel that their layers need: all that it is compiled for, and the device."""
    chosen: dict[tuple[object, ...], PagedExperts] = {}
    for layer in experts:
        biased = (layer.gate_up_bias is not None, layer.down_bias is not None)
        kernel = (replace(layer.shape, layer=0), layer.widths, layer.codebooks, biased, layer.tables.bits.device)
        chosen.setdefault(kernel, layer)
    return list(chosen.values())
