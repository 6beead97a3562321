"""Finds a model's routed experts by their structure and refuses, before anything changes, what cannot be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pagedweight.discovery_devices import refuse_mixed_devices
from pagedweight.discovery_gates import known_gate, recognise
from pagedweight.discovery_storage import DbrxStorage, FusedStorage, Storage
from pagedweight.experts import BIASES, PagedExperts
from pagedweight.integrations.hf_llama4 import routed_forward
from pagedweight.layout import MoeLayer, Projection

SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNSERVED_FLAGS = {
    "has_post_expert_norm": "normalises each expert's output, which is not served; leave this model unpatched",
    "_is_expert_parallel": "is split over expert-parallel ranks; load the model without expert parallelism",
}


class ExpertsModule(NamedTuple):
    """One MoE layer's experts where they stand in the model.

    path: the module's name in the model. shape.layer: the model's own layer number. dtype, trainable: of its weights.
    storage: how it keeps them. block: the module around it when that does not call experts with ids and weights, so
    that its own forward must be replaced too.
    """

    path: str
    module: nn.Module
    shape: MoeLayer
    dtype: torch.dtype
    trainable: bool
    storage: Storage = FusedStorage()
    block: nn.Module | None = None

    @property
    def has_weights(self) -> bool:
        return _found(self.module, self.storage.names[-1]) is not None

    @property
    def dense_bytes(self) -> int:
        """What its weights take as they are, or took."""
        matrices = (rows * columns for rows, columns in map(self.shape.shape, Projection))
        return self.shape.experts * sum(matrices) * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether the module itself keeps gate_up_proj and down_proj in the form of weights(), without biases."""
        return self.storage == FusedStorage() and self.block is None and self.shape.gated and not self.biases()

    @property
    def device(self) -> torch.device:
        return attrgetter(self.storage.names[-1])(self.module).device

    def weights(self) -> tuple[Tensor, Tensor]:
        """gate_up (E, 2I, H), gate rows first, or (E, I, H) without a gate, and down (E, H, I)."""
        return self.storage.read(self.module)

    def biases(self) -> dict[str, Tensor]:
        """Those of experts.BIASES that it has: (E, rows of its matrix), gate first."""
        return self.storage.read_biases(self.module)

    def put_biases(self, biases: dict[str, Tensor]) -> None:
        """New biases, as biases() gives them."""
        self.storage.write_biases(self.module, biases)

    def drop_weights(self) -> None:
        """Let go of the weights; the rest of the module stays, so that weights can be put back."""
        for name in self.storage.names:
            holder, _, own = name.rpartition(".")
            if _found(self.module, name) is not None:
                delattr(self.module.get_submodule(holder), own)

    def replace(self, model: nn.Module, paged: PagedExperts) -> None:
        """Put paged experts where the module stands."""
        model.set_submodule(self.path, paged)
        if self.block is not None:
            self.block.forward = routed_forward(self.block)

    def restore(self, model: nn.Module) -> None:
        """Put the module back where it stood."""
        model.set_submodule(self.path, self.module)
        if self.block is not None:
            del self.block.forward

    def put_weights(self, gate_up: Tensor, down: Tensor) -> None:
        """New weights of the shapes of weights(), in the dtype of the old ones."""
        self.storage.write(self.module, gate_up.to(self.dtype), down.to(self.dtype), self.trainable)


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
    """(path, module) of everything that has the structure of fused experts, or that an adapter knows by its class."""
    for path, module in model.named_modules():
        down = getattr(module, "down_proj", None)
        fused = isinstance(down, nn.Parameter) and down.dim() == 3
        fused = fused and hasattr(module, "_apply_gate") and hasattr(module, "num_experts")
        if fused or type(module).__name__ in ADAPTERS:
            yield path, module


def describe(model: nn.Module, path: str, module: nn.Module) -> ExpertsModule:
    """The module's shape and storage; ValueError when they are not known, or its gate is not."""
    return ADAPTERS.get(type(module).__name__, _describe_fused)(model, path, module)


def _describe_fused(model: nn.Module, path: str, module: nn.Module) -> ExpertsModule:
    for flag, refusal in UNSERVED_FLAGS.items():
        if getattr(module, flag, False):
            raise ValueError(f"{path} {refusal}")
    gated = bool(getattr(module, "has_gate", True))
    storage = FusedStorage(
        "gate_up_proj" if gated else "up_proj",
        transposed=bool(getattr(module, "is_transposed", False)),
        interleaved=not getattr(module, "is_concatenated", True),
    )
    with_bias = bool(getattr(module, "has_bias", False))
    _check_parameters(path, module, set(storage.names) | (set(storage.bias_names.values()) if with_bias else set()))
    gate = recognise(path, module, gated=gated, interleaved=storage.interleaved)
    return _described(path, module, storage, module.num_experts, gated, gate)


def _describe_dbrx(model: nn.Module, path: str, module: nn.Module) -> ExpertsModule:
    storage = DbrxStorage(module.num_experts)
    _check_parameters(path, module, set(storage.names))

    def apply(products: Tensor) -> Tensor:
        gate, up = products.chunk(2, dim=-1)
        return module.mlp.activation_fn(gate) * up

    gate = known_gate(path, apply, True, type(module.mlp.activation_fn).__name__)
    return _described(path, module, storage, module.num_experts, True, gate)


def _describe_llama4(model: nn.Module, path: str, module: nn.Module) -> ExpertsModule:
    storage = FusedStorage(transposed=True)
    _check_parameters(path, module, set(storage.names))
    block = model.get_submodule(path.rpartition(".")[0]) if path else None
    if getattr(block, "top_k", None) != 1:
        raise ValueError(
            f"{path or 'the experts module'} is called for {getattr(block, 'top_k', 'an unknown number of')} experts "
            "per token; Llama 4 experts are served inside their block, with one expert per token"
        )
    if "forward" in vars(block):
        raise ValueError(f"the block around {path} has a forward of its own; remove the hooks of the model first")

    def apply(products: Tensor) -> Tensor:
        gate, up = products.chunk(2, dim=-1)
        return module.act_fn(gate) * up

    gate = known_gate(path, apply, True, type(module.act_fn).__name__)
    return _described(path, module, storage, module.num_experts, True, gate)._replace(block=block)


ADAPTERS: Mapping[str, Callable[[nn.Module, str, nn.Module], ExpertsModule]] = {
    "DbrxExperts": _describe_dbrx,
    "Llama4TextExperts": _describe_llama4,
}


def _check_parameters(path: str, module: nn.Module, wanted: set[str]) -> None:
    parameters = dict(module.named_parameters())
    if parameters.keys() != wanted:
        raise ValueError(
            f"{path} has parameters {sorted(parameters)}; only {sorted(wanted)} are served in this kind of experts"
        )
    for name, weight in parameters.items():
        if isinstance(weight, DTensor):
            raise ValueError(f"{path}.{name} is sharded over devices; load the model without a tp_plan")
        if weight.dtype not in SERVED_DTYPES:
            raise ValueError(f"{path}.{name} is {weight.dtype}; load the model in bfloat16, float16 or float32")


def _described(
    path: str, module: nn.Module, storage: Storage, experts: int, gated: bool, gate: tuple[str, float]
) -> ExpertsModule:
    gate_up, down = storage.read(module)
    _, hidden, intermediate = down.shape
    shape = MoeLayer(layer_number(path), experts, hidden, intermediate, gate[0], gated, gate[1])
    wanted = [(experts, *shape.shape(projection)) for projection in Projection]
    biases = storage.read_biases(module)
    for name, tensor, right in [
        *zip(("gate_up", "down"), (gate_up, down), wanted, strict=True),
        *((name, biases[name], right[:2]) for name, right in zip(BIASES, wanted, strict=True) if name in biases),
    ]:
        if tensor.shape != right:
            raise ValueError(
                f"{path} has {name} weights {tuple(tensor.shape)} beside {experts} experts of {hidden} columns and "
                f"down rows of {intermediate}; wanted {right}"
            )
    weight = attrgetter(storage.names[-1])(module)
    return ExpertsModule(path, module, shape, weight.dtype, weight.requires_grad, storage)


def layer_number(path: str) -> int:
    """The model's own layer number: the last number in the module's path."""
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    if not numbers:
        raise ValueError(f"{path or 'the experts module'} has no layer number in its path; patch the whole model")
    return numbers[-1]


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
        " (a module with num_experts, _apply_gate and a 3-D down_proj); give a mixture-of-experts model of "
        "transformers 5.9 or later"
    )


def _found(module: nn.Module, name: str) -> nn.Parameter | None:
    holder, _, own = name.rpartition(".")
    return getattr(module.get_submodule(holder), own, None)
