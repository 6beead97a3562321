"""The kinds of experts modules that are served: which parts tell them, and how what they hold is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pagedweight.discovery_experts import ExpertsModule
from pagedweight.discovery_gates import known_gate, recognise
from pagedweight.discovery_storage import DbrxStorage, FusedStorage, Storage
from pagedweight.experts import BIASES
from pagedweight.layout import MoeLayer, Projection

SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNSERVED_FLAGS = {
    "has_post_expert_norm": "normalises each expert's output, which is not served; leave this model unpatched",
    "_is_expert_parallel": "is split over expert-parallel ranks; load the model without expert parallelism",
}


class Kind(NamedTuple):
    """One kind of experts: whether a module has its parts, and what a module is that has them.

    describe: of (model, path, module); ValueError when the module has the parts and is not served all the same.
    """

    recognises: Callable[[nn.Module], bool]
    describe: Callable[[nn.Module, str, nn.Module], ExpertsModule]


def is_experts(module: nn.Module) -> bool:
    """Whether it has the structure of fused experts, or of the class that one of the other kinds is known by."""
    count = getattr(module, "num_experts", None)
    return isinstance(count, int) and count > 0 and _kind_of(module).recognises(module)


def describe(model: nn.Module, path: str, module: nn.Module) -> ExpertsModule:
    """The module's shape and storage; ValueError when they are not known, or its gate is not."""
    return _kind_of(module).describe(model, path, module)


def _kind_of(module: nn.Module) -> Kind:
    return KINDS.get(type(module).__name__, FUSED)


def _has(module: nn.Module, dimensions: int, *names: str) -> bool:
    """Whether all of these are parameters of so many dimensions."""
    found = [getattr(module, name, None) for name in names]
    return all(isinstance(one, nn.Parameter) and one.dim() == dimensions for one in found)


def _is_fused(module: nn.Module) -> bool:
    first = "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
    return _has(module, 3, first, "down_proj") and callable(getattr(module, "_apply_gate", None))


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


def _is_dbrx(module: nn.Module) -> bool:
    mlp = getattr(module, "mlp", None)
    if not isinstance(mlp, nn.Module) or not _has(mlp, 2, "w1", "v1", "w2"):
        return False
    return mlp.w1.shape == mlp.v1.shape == mlp.w2.shape and len(mlp.w1) % module.num_experts == 0


def _describe_dbrx(model: nn.Module, path: str, module: nn.Module) -> ExpertsModule:
    storage = DbrxStorage(module.num_experts)
    _check_parameters(path, module, set(storage.names))

    def apply(products: Tensor) -> Tensor:
        gate, up = products.chunk(2, dim=-1)
        return module.mlp.activation_fn(gate) * up

    gate = known_gate(path, apply, True, type(getattr(module.mlp, "activation_fn", None)).__name__)
    return _described(path, module, storage, module.num_experts, True, gate)


def _is_llama4(module: nn.Module) -> bool:
    return _has(module, 3, "gate_up_proj", "down_proj")


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

    gate = known_gate(path, apply, True, type(getattr(module, "act_fn", None)).__name__)
    return _described(path, module, storage, module.num_experts, True, gate)._replace(block=block)


FUSED = Kind(_is_fused, _describe_fused)
KINDS: Mapping[str, Kind] = {
    "DbrxExperts": Kind(_is_dbrx, _describe_dbrx),
    "Llama4TextExperts": Kind(_is_llama4, _describe_llama4),
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
