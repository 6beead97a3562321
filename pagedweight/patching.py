"""patch() and unpatch(): the one place where a model, its pages, the runtime and the kernels meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from pagedweight.checkpoint import FOLDER, Checkpoint, CheckpointError
from pagedweight.discovery import find_experts
from pagedweight.discovery_devices import kernel_cache_folder, refuse_old_device, refuse_unwritable
from pagedweight.discovery_experts import ExpertsModule
from pagedweight.integrations.hf_hooks import add_boundary_hooks, batching_methods
from pagedweight.layout import Layout
from pagedweight.patching_devices import SpreadModel, kv_of_shares, shares_of
from pagedweight.patching_fill import Filling
from pagedweight.patching_model import PagedModel
from pagedweight.patching_pages import layout_of
from pagedweight.patching_quantize import Measured, sensitivity_policy
from pagedweight.patching_sizes import kv_layers_of, warn_unless_smaller
from pagedweight.patching_undo import give_back, is_lost, undo
from pagedweight.policy import Policy
from pagedweight.quant.levels import check_level
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.saving_patched import saver
from pagedweight.shared_experts import fold_shared_experts, unfold_shared_experts

WIDTHS = (2, 3, 4, 5, 6)
Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    checkpoint: str | Path | None = None,
    policy: Policy | None = None,
    config: RuntimeConfig | None = None,
    keep_original: bool = False,
    level: str = "fast",
    calibration: Measured | None = None,
    shared_experts: bool = False,
) -> Model:
    """Replace a model's routed experts by paged ones, in place; returns the model, with its runtime at .pagedweight.

    checkpoint: a folder written by quantize() or save(); without it the weights are quantized now.
    policy: calibration's results; by default those of the checkpoint, or the quantization error alone.
    config: without budget_bytes everything stays at the parent width and the KV cache stays outside.
    keep_original: keep the dense weights for an exact unpatch(); otherwise each layer's are dropped as it is quantized.
    level, calibration: of quantizing now, as in quantize(); calibration is a Statistics of this model.
    shared_experts: page the shared experts too, which every token reads; quantized now, and never saved.
    ValueError (or CheckpointError) when the model, the checkpoint or the budget will not do; the model is unchanged.
    When it fails half-way, layers that had lost their dense weights get their parent-width ones back. RuntimeError when
    memory is short even for that: the model lacks experts then, and each forward says so.
    """
    check_options(policy, config)
    config = config or RuntimeConfig()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}, a {type(model).__name__}; give a loaded model, or use from_pretrained")
    if hasattr(model, "pagedweight"):
        raise ValueError(f"this {type(model).__name__} is patched already; unpatch it first")
    if is_lost(model):
        raise ValueError(f"this {type(model).__name__} has lost experts in a patch that failed; load it again")
    check_level(level, calibration is not None)
    folded = fold_shared_experts(model) if shared_experts else []
    try:
        found = find_experts(model)
        if checkpoint is not None:
            Checkpoint.open(checkpoint).verify()
        devices = [experts.device for experts in found]
        assemble(model, found, devices, checkpoint, policy, config, keep_original, level, calibration)
    except BaseException:
        if not is_lost(model):
            unfold_shared_experts(folded)
        raise
    model.pagedweight.folded = folded
    return model


def assemble(
    model: Model,
    found: list[ExpertsModule],
    devices: list[torch.device],
    checkpoint: str | Path | None,
    policy: Policy | None,
    config: RuntimeConfig,
    keep_original: bool = False,
    level: str = "fast",
    calibration: Measured | None = None,
) -> Model:
    """Build a runtime on each device for the experts that were found there, and put it in their place."""
    for device in set(devices):
        refuse_old_device(device, found)
        if device.type == "cuda":
            refuse_unwritable(kernel_cache_folder())
    with torch.inference_mode(False), torch.no_grad():
        opened = None if checkpoint is None else Checkpoint.open(checkpoint)
        given = () if opened is None else (opened.layout.widths, opened.layout.codebooks)
        layout = layout_of([e.shape for e in found], *(given or (WIDTHS,)))
        if opened is not None:
            check_same_layers(layout, opened.layout)
            policy = policy or policy_of(checkpoint)
        if policy is not None:
            policy.check_layout(layout)
        in_place = [model.get_submodule(e.path) for e in found]
        shares = shares_of(layout, devices)
        kv = kv_of_shares(shares, layout, kv_layers_of(model, in_place) if config.budget_bytes is not None else [])
        configs = [share.config(config, layout, n, len(shares)) for n, share in enumerate(shares)]
        begun = [Filling.begin(*own, layout, opened, found) for own in zip(shares, configs, kv, strict=True)]
        parts: list[PagedModel] = []
        try:
            if opened is None:
                s_bar = np.empty((layout.rows, len(layout.widths)))
                for one in begun:
                    s_bar[one.share.rows] = one.quantize(keep_original, level, calibration)
                policy = policy or sensitivity_policy(layout, s_bar, calibration)
            else:
                for one in begun:
                    one.read(opened, keep_original)
            model_config = getattr(model, "config", None)
            for share, own, store, sizes, mine, _ in begun:
                parts.append(PagedModel(store, sizes, share.policy(policy), own, share.device, model_config))
                parts[-1].replaced = mine
            paged = parts[0] if len(parts) == 1 else SpreadModel(layout, policy, config, shares, parts)
            paged.recipe = {"level": level, "seed": "0"} if opened is None else opened.recipe
            install(model, paged, found)
        except BaseException:
            undo(model, begun, parts)
            raise
    return model


def check_options(policy: object, config: object, others: Iterable[str] = ()) -> None:
    """TypeError for a policy or a config of another type, and for fields of a config among the other options."""
    check_kind("policy", policy, Policy, "Policy.load(folder)")
    check_kind("config", config, RuntimeConfig, "RuntimeConfig(budget_bytes=...)")
    misplaced = sorted({field.name for field in fields(RuntimeConfig)} & set(others))
    if misplaced:
        raise TypeError(f"{', '.join(misplaced)} belongs in the config; give config=RuntimeConfig({misplaced[0]}=...)")


def check_kind(name: str, given: object, wanted: type, such: str) -> None:
    """TypeError unless an option is None or of its kind, of which `such` is an example."""
    if not isinstance(given, wanted | None):
        raise TypeError(f"{name} is {given!r:.80}, a {type(given).__name__}; give a {wanted.__name__}, as {such}")


def policy_of(checkpoint: str | Path) -> Policy:
    """The policy beside a checkpoint's pages. CheckpointError when there is none."""
    try:
        return Policy.load(Path(checkpoint) / FOLDER)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint} has pages but not both policy.json and policy.safetensors; copy the whole folder, "
            "or give a policy"
        ) from error


def check_same_layers(model: Layout, checkpoint: Layout) -> None:
    """ValueError unless the checkpoint was made for experts like the model's."""
    if model.moe_layers != checkpoint.moe_layers:
        mine, other = set(model.moe_layers), set(checkpoint.moe_layers)
        raise ValueError(
            f"the checkpoint is for other experts: the model has {sorted(map(str, mine - other))[:2]}, the checkpoint "
            f"{sorted(map(str, other - mine))[:2]}; quantize this model into a checkpoint of its own"
        )


def install(model: nn.Module, paged: PagedModel | SpreadModel, originals: list[ExpertsModule]) -> None:
    """Put the paged experts in place and hook the boundary to the model's forward, or leave it as it was."""
    warn_unless_smaller(
        sum(int(part.store.sizes.resident_bytes()[:, -1].sum()) for part in paged.parts),
        sum(one.dense_bytes for one in originals),
    )
    modules = [paged.experts_for(index, one.biases(), one.dtype) for index, one in enumerate(originals)]
    saving = {"save_pretrained": saver(model)} if hasattr(model, "save_pretrained") else {}
    paged.replaced = originals
    paged.hooks = add_boundary_hooks(model, paged, **saving, **batching_methods(model, paged))
    try:
        for original, module in zip(originals, modules, strict=True):
            original.replace(model, module)
        model.pagedweight = paged
    except BaseException:
        paged.hooks.take_off()
        for original, module in zip(originals, modules, strict=True):
            if model.get_submodule(original.path) is module:
                original.restore(model)
        raise
    if getattr(model, "_compiled_call", None) is not None:
        model._compiled_call = None  # compiled with the dense experts


def unpatch(model: Model) -> Model:
    """Put dense experts back, in place: the originals after keep_original=True, else the parent-width ones.

    Returns the model. ValueError when it is not patched. Where memory is short, the model stays patched as it was.
    """
    paged = getattr(model, "pagedweight", None)
    if not isinstance(paged, PagedModel | SpreadModel):
        raise ValueError(f"this {type(model).__name__} is not patched")
    with torch.inference_mode(False), torch.no_grad():
        give_all_back(model, paged)
        for experts in paged.replaced:
            experts.restore(model)
        paged.hooks.take_off()
        paged.close()
        del model.pagedweight
        unfold_shared_experts(paged.folded)
    return model


def give_all_back(model: nn.Module, paged: PagedModel | SpreadModel) -> None:
    """Dense weights for every module that was replaced, as model.half() or model.to() would have left them; for none of
    them when one fails."""
    bare = [experts for experts in paged.replaced if not experts.has_weights]
    if bare and paged.closed:
        raise RuntimeError("the model's runtime is closed and its pages are gone, so it stays patched; load it again")
    try:
        for part in paged.parts:
            for experts in part.replaced:
                give_back(part.store, experts, part.arena.memory.device)
        for experts in paged.replaced:
            experts.module.to(dtype=model.get_submodule(experts.path).dense_dtype)
    except BaseException:
        for experts in bare:
            experts.drop_weights()
        raise
