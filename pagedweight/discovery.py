"""Finds a model's routed experts by their structure and refuses, before anything changes, what cannot be served."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pagedweight.discovery_devices import refuse_mixed_devices
from pagedweight.discovery_experts import ExpertsModule
from pagedweight.discovery_kinds import describe, is_experts
from pagedweight.experts import PagedExperts


def find_experts(model: nn.Module, *, on_meta: bool = False) -> list[ExpertsModule]:
    """Every routed-experts module of a model, in layer order. Reads the model, changes nothing.

    on_meta: the weights are still to be loaded, so meta tensors are what is wanted.
    ValueError, one sentence that says what to do, when there are none or one cannot be served.
    """
    refuse_wrappers(model)
    if not on_meta:
        refuse_quantized(model)
    found = [describe(model, path, module) for path, module in candidates(model)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no routed experts that are served{_others(model)}")
    if not on_meta:
        refuse_absent_weights(found)
    refuse_repeated_layers(found)
    return sorted(found, key=lambda experts: experts.shape.layer)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of everything that has the structure of experts of a kind that is served."""
    return ((path, module) for path, module in model.named_modules() if is_experts(module))


def refuse_wrappers(model: nn.Module) -> None:
    """ValueError when experts are paged already, or when an adapter is wrapped around them."""
    for path, module in model.named_modules():
        if isinstance(module, PagedExperts):
            raise ValueError(f"{path} is patched already; unpatch the model first")
        inner = getattr(module, "base_layer", None)
        if isinstance(inner, nn.Module) and any(True for _ in candidates(inner)):
            raise ValueError(
                f"an adapter of type {type(module).__name__} is wrapped around the expert weights at {path}, and would "
                "be lost; merge and unload it first"
            )


def refuse_quantized(model: nn.Module) -> None:
    """ValueError when another method has quantized the model: its experts are no dense weights, or not alone."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
        raise ValueError(
            f"this {type(model).__name__} is quantized by {getattr(method, 'value', method)}; load it in bfloat16 "
            "(for MXFP4 and FP8 files with dequantize=True in their quantization_config)"
        )


def refuse_absent_weights(found: list[ExpertsModule]) -> None:
    """ValueError when a weight is on the meta device, offloaded, or on another device than the rest."""
    devices: set[torch.device] = set()
    for path, module, *_ in found:
        own = {weight.device for weight in module.parameters()}
        if len(own) > 1:
            raise ValueError(f"{path} is spread over {', '.join(sorted(map(str, own)))}; keep each layer on one device")
        devices |= own
        if hasattr(module, "_hf_hook") and getattr(module._hf_hook, "offload", False):
            raise ValueError(f"{path} is offloaded to CPU or disk by accelerate; load the model on one device")
        for name, weight in module.named_parameters():
            if weight.is_meta:
                raise ValueError(
                    f"{path}.{name} is on the meta device and has no data; load the model's weights before patching"
                )
    refuse_mixed_devices(devices)


def refuse_repeated_layers(found: list[ExpertsModule]) -> None:
    paths: dict[int, str] = {}
    for experts in found:
        other = paths.setdefault(experts.shape.layer, experts.path)
        if other != experts.path:
            raise ValueError(f"{other} and {experts.path} are both layer {experts.shape.layer}; patch them one by one")


def _others(model: nn.Module) -> str:
    """Experts of another design, by their class names, for the message that there are none of ours."""
    for path, module in model.named_modules():
        if "Expert" in type(module).__name__:
            return f": {path} is a {type(module).__name__}, whose weights are kept in a form of their own"
    return (
        " (a module with num_experts, _apply_gate and 3-D gate_up_proj and down_proj: docs/own-models.md); give a "
        "mixture-of-experts model, of transformers 5.9 or later"
    )
