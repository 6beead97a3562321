"""Finds a model's routed experts by their structure and refuses, before anything changes, what cannot be served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pagedweight.experts import PagedExperts
from pagedweight.layout import MoeLayer

PARAMETERS = ("gate_up_proj", "down_proj")
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}
FLAGS = {
    "is_transposed": (False, "keeps its weights transposed"),
    "has_bias": (False, "adds biases"),
    "has_gate": (True, "has no gate"),
    "is_concatenated": (True, "interleaves gate and up rows"),
    "has_post_expert_norm": (False, "normalises each expert's output"),
    "_is_expert_parallel": (False, "is split over expert-parallel ranks"),
}


class ExpertsModule(NamedTuple):
    """One MoE layer's experts where they stand in the model.

    path: the module's name in the model. shape.layer: the model's own layer number. dtype, trainable: of its weights.
    """

    path: str
    module: nn.Module
    shape: MoeLayer
    dtype: torch.dtype
    trainable: bool

    @property
    def has_weights(self) -> bool:
        return getattr(self.module, "down_proj", None) is not None

    def drop_weights(self) -> None:
        """Let go of the weights; the rest of the module stays, so that weights can be put back."""
        for name in PARAMETERS:
            if getattr(self.module, name, None) is not None:
                delattr(self.module, name)

    def put_weights(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """New weights (E, 2I, H) and (E, H, I), in the dtype of the old ones."""
        for name, weight in zip(PARAMETERS, (gate_up, down), strict=True):
            self.module.register_parameter(name, nn.Parameter(weight.to(self.dtype), requires_grad=self.trainable))


def find_experts(model: nn.Module, *, on_meta: bool = False) -> list[ExpertsModule]:
    """Every routed-experts module of a model, in layer order. Reads the model, changes nothing.

    on_meta: the weights are still to be loaded, so meta tensors are what is wanted.
    ValueError, one sentence that says what to do, when there are none or one cannot be served.
    """
    refuse_wrappers(model)
    found = [describe(path, module) for path, module in candidates(model)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no fused routed experts (a module with num_experts, _apply_gate and a 3-D "
            "down_proj); give a mixture-of-experts model of transformers 5.9 or later"
        )
    if not on_meta:
        refuse_absent_weights(found)
    refuse_repeated_layers(found)
    return sorted(found, key=lambda experts: experts.shape.layer)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of everything that has the structure of fused experts."""
    for path, module in model.named_modules():
        down = getattr(module, "down_proj", None)
        fused = isinstance(down, nn.Parameter) and down.dim() == 3
        if fused and hasattr(module, "_apply_gate") and hasattr(module, "num_experts"):
            yield path, module


def describe(path: str, module: nn.Module) -> ExpertsModule:
    """The module's shape; ValueError when its layout is not [E, 2I, H] and [E, H, I] with a known gate."""
    for flag, (served, meaning) in FLAGS.items():
        if bool(getattr(module, flag, served)) is not served:
            raise ValueError(f"{path} {meaning}, which is not served yet; leave this model unpatched")
    names = {name for name, _ in module.named_parameters()}
    if names != set(PARAMETERS):
        raise ValueError(f"{path} has parameters {sorted(names)}; only {' and '.join(PARAMETERS)} are served")
    gate_up, down = (getattr(module, name) for name in PARAMETERS)
    for name, weight in zip(PARAMETERS, (gate_up, down), strict=True):
        if isinstance(weight, DTensor):
            raise ValueError(f"{path}.{name} is sharded over devices; load the model without a tp_plan")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{path}.{name} is {weight.dtype}; load the model in bfloat16, float16 or float32")
    experts, hidden, intermediate = down.shape
    if gate_up.shape != (experts, 2 * intermediate, hidden) or experts != module.num_experts:
        raise ValueError(
            f"{path} has gate_up_proj {tuple(gate_up.shape)}, down_proj {tuple(down.shape)} and "
            f"num_experts {module.num_experts}; wanted (E, 2I, H) and (E, H, I)"
        )
    shape = MoeLayer(layer_number(path), experts, hidden, intermediate, activation(path, module))
    return ExpertsModule(path, module, shape, down.dtype, down.requires_grad)


def layer_number(path: str) -> int:
    """The model's own layer number: the last number in the module's path."""
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    if not numbers:
        raise ValueError(f"{path or 'the experts module'} has no layer number in its path; patch the whole model")
    return numbers[-1]


def activation(path: str, module: nn.Module) -> str:
    """Which known gate the module's own `_apply_gate` is, seen by what it does to a few numbers."""
    with torch.no_grad(), torch.device("cpu"):
        gate_up = torch.linspace(-9, 9, 2 * 33).view(2, 33).T.reshape(1, -1)
        got = module._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    for name, act in ACTIVATIONS.items():
        if got.shape == gate.shape and torch.allclose(got, act(gate) * up, rtol=1e-4, atol=1e-5):
            return name
    raise ValueError(
        f"{path} combines gate and up in a way that is not served (its act_fn is "
        f"{type(getattr(module, 'act_fn', None)).__name__}); served are {', '.join(ACTIVATIONS)} times up"
    )


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


def refuse_absent_weights(found: list[ExpertsModule]) -> None:
    """ValueError when a weight is on the meta device, offloaded, or on another device than the rest."""
    for path, module, *_ in found:
        if hasattr(module, "_hf_hook") and getattr(module._hf_hook, "offload", False):
            raise ValueError(f"{path} is offloaded to CPU or disk by accelerate; load the model on one device")
        for name in PARAMETERS:
            if getattr(module, name).is_meta:
                raise ValueError(
                    f"{path}.{name} is on the meta device and has no data; load the model's weights before patching"
                )
    devices = {str(getattr(experts.module, name).device) for experts in found for name in PARAMETERS}
    if len(devices) > 1:
        raise ValueError(f"expert weights are spread over {', '.join(sorted(devices))}; load the model on one device")


def refuse_repeated_layers(found: list[ExpertsModule]) -> None:
    paths: dict[int, str] = {}
    for experts in found:
        other = paths.setdefault(experts.shape.layer, experts.path)
        if other != experts.path:
            raise ValueError(f"{other} and {experts.path} are both layer {experts.shape.layer}; patch them one by one")
