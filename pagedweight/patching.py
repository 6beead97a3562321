"""patch() and unpatch(): the one place where a model, its pages, the runtime and the kernels meet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagedweight.checkpoint import FOLDER, Checkpoint
from pagedweight.discovery import PARAMETERS, ExpertsModule, find_experts
from pagedweight.integrations.hf_hooks import add_boundary_hook
from pagedweight.layout import Layout, Projection
from pagedweight.patching_model import PagedModel
from pagedweight.patching_pages import PageStore, lut_layout, quantize_layer, weight_only_policy
from pagedweight.patching_sizes import choose_sizes, kv_layers_of
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig

WIDTHS = (2, 3, 4, 5, 6)


class Original(NamedTuple):
    """The module that paged experts stand in for. weights: whether it still has its own."""

    path: str
    module: nn.Module
    dtype: torch.dtype
    trainable: bool
    weights: bool


class Patched(NamedTuple):
    """What unpatch needs."""

    originals: list[Original]
    hook: RemovableHandle


def patch(
    model: nn.Module,
    *,
    checkpoint: str | Path | None = None,
    policy: Policy | None = None,
    config: RuntimeConfig | None = None,
    keep_original: bool = False,
) -> nn.Module:
    """Replace a model's routed experts by paged ones, in place; returns the model, with its runtime at .pagedweight.

    checkpoint: a folder written by quantize() or save(); without it the weights are quantized now (level "fast").
    policy: calibration's results; by default those of the checkpoint, or the quantization error alone.
    config: without budget_bytes everything stays at the parent width and the KV cache stays outside.
    keep_original: keep the dense weights for an exact unpatch(); otherwise each layer's are dropped as it is quantized.
    ValueError (or CheckpointError) when the model, the checkpoint or the budget will not do; the model is unchanged.
    """
    config = config or RuntimeConfig()
    if hasattr(model, "pagedweight"):
        raise ValueError(f"this {type(model).__name__} is patched already; unpatch it first")
    found = find_experts(model)
    return assemble(model, found, found[0].module.down_proj.device, checkpoint, policy, config, keep_original)


def assemble(
    model: nn.Module,
    found: list[ExpertsModule],
    device: torch.device,
    checkpoint: str | Path | None,
    policy: Policy | None,
    config: RuntimeConfig,
    keep_original: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Build the runtime for the experts that were found and put it in their place; dtype: of weights not loaded."""
    with torch.inference_mode(False), torch.no_grad():
        opened = None if checkpoint is None else Checkpoint.open(checkpoint)
        shapes = tuple(experts.shape for experts in found)
        layout = lut_layout(shapes, WIDTHS if opened is None else opened.layout.widths)
        if opened is not None:
            check_same_layers(layout, opened.layout)
            policy = policy or Policy.load(Path(checkpoint) / FOLDER)
        if policy is not None:
            policy.check_layout(layout)
        kv_layers = kv_layers_of(model, [e.module for e in found]) if config.budget_bytes is not None else []
        sizes = choose_sizes(layout, config, kv_layers)
        store = PageStore(layout, sizes.frame_bytes, config.host_pinned_bytes if device.type == "cuda" else 0)
        originals = [describe_original(experts, keep_original, dtype) for experts in found]
        if opened is not None:
            for block in layout.blocks():
                store.store(block, opened.block(block))
            drop_weights(originals)
        else:
            measured = quantize_into(store, found, originals)
            policy = policy or weight_only_policy(layout, measured)
        try:
            paged = PagedModel(store, sizes, policy, config, device, getattr(model, "config", None))
        except BaseException:
            restore_weights(store, originals, device)
            raise
        install(model, paged, originals)
    return model


def quantize_into(store: PageStore, found: list[ExpertsModule], originals: list[Original]) -> np.ndarray:
    """Quantize layer by layer, dropping each layer's dense weights unless they are kept; returns s_i^b, (R, W).

    When a layer fails, the layers before it get back what they were quantized to at the parent width.
    """
    measured = []
    device = found[0].module.down_proj.device
    for index, experts in enumerate(found):
        try:
            layer = quantize_layer(experts, store.layout.widths)
            for block, packed in layer.blocks:
                store.store(block, packed)
        except BaseException:
            restore_weights(store, originals[:index], device)
            raise
        measured.append(layer.sensitivity)
        drop_weights(originals[index : index + 1])
    return np.concatenate(measured)


def check_same_layers(model: Layout, checkpoint: Layout) -> None:
    """ValueError unless the checkpoint was made for experts like the model's."""
    if model.moe_layers != checkpoint.moe_layers:
        mine, other = set(model.moe_layers), set(checkpoint.moe_layers)
        raise ValueError(
            f"the checkpoint is for other experts: the model has {sorted(map(str, mine - other))[:2]}, the checkpoint "
            f"{sorted(map(str, other - mine))[:2]}; quantize this model into a checkpoint of its own"
        )


def describe_original(experts: ExpertsModule, keep: bool, dtype: torch.dtype | None) -> Original:
    down = getattr(experts.module, "down_proj", None)
    if down is None:
        return Original(experts.path, experts.module, dtype, True, False)
    return Original(experts.path, experts.module, down.dtype, down.requires_grad, keep)


def drop_weights(originals: Sequence[Original]) -> None:
    """Let go of dense weights that are not to be kept; the modules stay, for unpatch."""
    for original in originals:
        if not original.weights:
            for name in PARAMETERS:
                if getattr(original.module, name, None) is not None:
                    delattr(original.module, name)


def restore_weights(store: PageStore, originals: Sequence[Original], device: torch.device) -> None:
    """Give modules that lost their weights the parent-width ones."""
    by_layer = {original.path: layer for original, layer in zip(originals, store.layout.moe_layers, strict=False)}
    for original in originals:
        for name, projection in zip(PARAMETERS, Projection, strict=True):
            if getattr(original.module, name, None) is None:
                dense = store.dense(by_layer[original.path], projection, store.layout.parent_width)
                weight = nn.Parameter(dense.to(device, original.dtype), requires_grad=original.trainable)
                original.module.register_parameter(name, weight)


def install(model: nn.Module, paged: PagedModel, originals: list[Original]) -> None:
    """Put the paged experts in place and hook the boundary to the model's forward."""
    for index, original in enumerate(originals):
        model.set_submodule(original.path, paged.experts_for(index))
    if getattr(model, "_compiled_call", None) is not None:
        model._compiled_call = None  # compiled with the dense experts
    paged.patched = Patched(originals, add_boundary_hook(model, paged))
    model.pagedweight = paged


def unpatch(model: nn.Module) -> nn.Module:
    """Put dense experts back, in place: the originals after keep_original=True, else the parent-width ones."""
    paged = getattr(model, "pagedweight", None)
    if not isinstance(paged, PagedModel):
        raise ValueError(f"this {type(model).__name__} is not patched")
    with torch.inference_mode(False), torch.no_grad():
        originals, hook = paged.patched
        restore_weights(paged.store, originals, paged.arena.memory.device)
        for original in originals:
            model.set_submodule(original.path, original.module)
        hook.remove()
        paged.close()
        del model.pagedweight
    return model
