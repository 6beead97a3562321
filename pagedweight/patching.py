"""patch() and unpatch(): the one place where a model, its pages, the runtime and the kernels meet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pagedweight.checkpoint import FOLDER, Checkpoint, CheckpointError
from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.discovery_devices import kernel_cache_folder, refuse_old_device, refuse_unwritable
from pagedweight.integrations.hf_hooks import add_boundary_hooks, batching_methods
from pagedweight.layout import Layout, Projection
from pagedweight.patching_devices import OwnLayers, Share, SpreadModel, kv_of_shares, shares_of
from pagedweight.patching_model import PagedModel
from pagedweight.patching_pages import PageStore, layout_of, quantize_layer
from pagedweight.patching_quantize import Measured, sensitivity_policy
from pagedweight.patching_sizes import KVLayers, Sizes, choose_sizes, kv_layers_of, warn_unless_smaller
from pagedweight.policy import Policy
from pagedweight.quant.levels import check_level
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.saving_patched import saver
from pagedweight.shared_experts import fold_shared_experts, unfold_shared_experts

WIDTHS = (2, 3, 4, 5, 6)


def patch(
    model: nn.Module,
    *,
    checkpoint: str | Path | None = None,
    policy: Policy | None = None,
    config: RuntimeConfig | None = None,
    keep_original: bool = False,
    level: str = "fast",
    calibration: Measured | None = None,
    shared_experts: bool = False,
) -> nn.Module:
    """Replace a model's routed experts by paged ones, in place; returns the model, with its runtime at .pagedweight.

    checkpoint: a folder written by quantize() or save(); without it the weights are quantized now.
    policy: calibration's results; by default those of the checkpoint, or the quantization error alone.
    config: without budget_bytes everything stays at the parent width and the KV cache stays outside.
    keep_original: keep the dense weights for an exact unpatch(); otherwise each layer's are dropped as it is quantized.
    level, calibration: of quantizing now, as in quantize(); calibration is a Statistics of this model.
    shared_experts: page the shared experts too, which every token reads; quantized now, and never saved.
    ValueError (or CheckpointError) when the model, the checkpoint or the budget will not do; the model is unchanged.
    When quantizing itself fails half-way, layers that had lost their dense weights get their parent-width ones back.
    """
    config = config or RuntimeConfig()
    if hasattr(model, "pagedweight"):
        raise ValueError(f"this {type(model).__name__} is patched already; unpatch it first")
    check_level(level, calibration is not None)
    folded = fold_shared_experts(model) if shared_experts else []
    try:
        found = find_experts(model)
        if checkpoint is not None:
            Checkpoint.open(checkpoint).verify()
        devices = [experts.device for experts in found]
        assemble(model, found, devices, checkpoint, policy, config, keep_original, level, calibration)
    except BaseException:
        unfold_shared_experts(folded)
        raise
    model.pagedweight.folded = folded
    return model


def assemble(
    model: nn.Module,
    found: list[ExpertsModule],
    devices: list[torch.device],
    checkpoint: str | Path | None,
    policy: Policy | None,
    config: RuntimeConfig,
    keep_original: bool = False,
    level: str = "fast",
    calibration: Measured | None = None,
) -> nn.Module:
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
        held = [begin_pages(*own, layout, opened) for own in zip(shares, configs, kv, strict=True)]
        parts: list[PagedModel] = []
        try:
            if opened is None:
                s_bar = np.empty((layout.rows, len(layout.widths)))
                for share, (store, _, done) in zip(shares, held, strict=True):
                    own = [found[index] for index in share.layers]
                    measured = None if calibration is None else OwnLayers(calibration, share)
                    s_bar[share.rows] = quantize_into(store, own, done, keep_original, level, measured)
                policy = policy or sensitivity_policy(layout, s_bar, calibration)
            else:
                for share, (store, _, done) in zip(shares, held, strict=True):
                    read_into(store, opened, [found[index] for index in share.layers], done, keep_original)
            for share, own, (store, sizes, _) in zip(shares, configs, held, strict=True):
                own_policy = share.policy(policy)
                parts.append(PagedModel(store, sizes, own_policy, own, share.device, getattr(model, "config", None)))
            paged = parts[0] if len(parts) == 1 else SpreadModel(layout, policy, config, shares, parts)
            paged.recipe = {"level": level, "seed": "0"} if opened is None else opened.recipe
            for share, part in zip(shares, parts, strict=True):
                part.replaced = [found[index] for index in share.layers]
            install(model, paged, found)
        except BaseException:
            for share, (store, _, done) in zip(shares, held, strict=True):
                restore_weights(store, done, share.device)
            for part in parts:
                part.close()
            raise
    return model


def begin_pages(
    share: Share, config: RuntimeConfig, kv_layers: KVLayers, layout: Layout, opened: Checkpoint | None
) -> tuple[PageStore, Sizes, list[ExpertsModule]]:
    """Where one device's pages will be kept, how large its arena is, and whose weights have been taken: none yet."""
    own = share.layout(layout)
    sizes = choose_sizes(own, config, kv_layers)
    on_cuda = share.device.type == "cuda"
    mapped = opened if on_cuda or config.host_pinned_bytes is not None else None
    return PageStore(own, sizes.frame_bytes, config.host_pinned_bytes if on_cuda else 0, mapped), sizes, []


def quantize_into(
    store: PageStore,
    found: list[ExpertsModule],
    done: list[ExpertsModule],
    keep: bool,
    level: str,
    calibration: Measured | None,
) -> np.ndarray:
    """Quantize layer by layer, dropping each layer's dense weights unless they are kept; returns s_bar, (R, W)."""
    s_bar = []
    for index, experts in enumerate(found):
        stakes = None if calibration is None else calibration.importance(index)
        layer = quantize_layer(experts, store.layout, level=level, stakes=stakes)
        for block, packed in layer.blocks:
            store.store(block, packed)
        s_bar.append(layer.s_bar)
        done.append(experts)
        if not keep:
            experts.drop_weights()
    return np.concatenate(s_bar)


def read_into(
    store: PageStore, opened: Checkpoint, found: list[ExpertsModule], done: list[ExpertsModule], keep: bool
) -> None:
    """Read every page, then drop the dense weights unless they are kept."""
    for block in store.layout.blocks():
        store.store(block, opened.block(block))
    done.extend(experts for experts in found if experts.has_weights)
    if not keep:
        for experts in found:
            experts.drop_weights()


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


def restore_weights(store: PageStore, originals: Sequence[ExpertsModule], device: torch.device) -> None:
    """Give modules that lost their weights the parent-width ones."""
    for experts in originals:
        if not experts.has_weights:
            dense = [store.dense(experts.shape, projection, store.layout.parent_width) for projection in Projection]
            experts.put_weights(*(weight.to(device) for weight in dense))


def install(model: nn.Module, paged: PagedModel | SpreadModel, originals: list[ExpertsModule]) -> None:
    """Put the paged experts in place and hook the boundary to the model's forward; what can fail comes first."""
    warn_unless_smaller(
        sum(int(part.store.sizes.resident_bytes()[:, -1].sum()) for part in paged.parts),
        sum(one.dense_bytes for one in originals),
    )
    modules = [paged.experts_for(index, one.biases(), one.dtype) for index, one in enumerate(originals)]
    saving = {"save_pretrained": saver(model)} if hasattr(model, "save_pretrained") else {}
    paged.replaced = originals
    paged.hooks = add_boundary_hooks(model, paged, **saving, **batching_methods(model, paged))
    for original, module in zip(originals, modules, strict=True):
        original.replace(model, module)
    if getattr(model, "_compiled_call", None) is not None:
        model._compiled_call = None  # compiled with the dense experts
    model.pagedweight = paged


def unpatch(model: nn.Module) -> nn.Module:
    """Put dense experts back, in place: the originals after keep_original=True, else the parent-width ones."""
    paged = getattr(model, "pagedweight", None)
    if not isinstance(paged, PagedModel | SpreadModel):
        raise ValueError(f"this {type(model).__name__} is not patched")
    with torch.inference_mode(False), torch.no_grad():
        for part in paged.parts:
            restore_weights(part.store, part.replaced, part.arena.memory.device)
        for experts in paged.replaced:
            # As model.half() or model.to() would have left it.
            experts.module.to(dtype=model.get_submodule(experts.path).dense_dtype)
            experts.restore(model)
        unfold_shared_experts(paged.folded)
        paged.hooks.take_off()
        paged.close()
        del model.pagedweight
    return model
