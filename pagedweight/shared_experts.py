"""Shared experts as experts that every token calls, so that they are paged like the routed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagedweight.discovery import find_experts
from pagedweight.discovery_experts import ExpertsModule

NAMES = ("shared_expert", "shared_experts")
GATE = "shared_expert_gate"
MATRICES = ("gate_proj", "up_proj", "down_proj")
TRIED_TOKENS = 8
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}  # of the largest output


class Folded(NamedTuple):
    """One layer's shared expert, without its weights, and where it stood. routed: experts of the layer before."""

    block: nn.Module
    name: str
    shared: nn.Module
    routed: int


def fold_shared_experts(model: nn.Module) -> list[Folded]:
    """Turn each layer's shared expert into further experts of that layer, in place; returns what unfolding takes.

    An expert n times as wide as the routed ones is the sum of n of their width. Every token calls them, with the
    shared expert's gate as their weight. Do it before the model is patched; config and folders do not know of it, so
    that such a model is not saved. ValueError, with the model as it was, when a layer's shared expert is not such a
    sum, or when the layer would not answer as before; whatever else goes wrong leaves the model as it was too.
    """
    done: list[Folded] = []
    try:
        for experts in find_experts(model):
            done.append(_fold(model, experts))
    except BaseException:
        unfold_shared_experts(done)
        raise
    return done


def unfold_shared_experts(folded: Sequence[Folded]) -> None:
    """Put shared experts back where they stood, from the weights that their layers have now."""
    for block, name, shared, routed in folded:
        experts = block.experts
        gate, up = (part.flatten(0, 1) for part in experts.gate_up_proj.detach()[routed:].chunk(2, dim=1))
        down = experts.down_proj.detach()[routed:].transpose(0, 1).flatten(1)
        for matrix, weight in zip(MATRICES, (gate, up, down), strict=True):
            _put(getattr(shared, matrix), "weight", weight)
        for weight in ("gate_up_proj", "down_proj"):
            _put(experts, weight, getattr(experts, weight).detach()[:routed])
        experts.num_experts = routed
        block.add_module(name, shared)
        vars(block).pop("forward", None)
        vars(block).pop("folded_experts", None)


def is_folded(model: nn.Module) -> bool:
    """Whether some layer's shared expert is among its experts."""
    return any("folded_experts" in vars(module) for module in model.modules())


def refuse_folded(model: nn.Module) -> None:
    """ValueError where a folder would be written that no config describes."""
    if is_folded(model):
        raise ValueError(
            "the model's shared experts are among its routed ones, which its config does not say; unfold them first "
            "(unfold_shared_experts), or keep it in memory"
        )


def _fold(model: nn.Module, experts: ExpertsModule) -> Folded:
    block = model.get_submodule(experts.path.rpartition(".")[0])
    name = next((name for name in NAMES if isinstance(getattr(block, name, None), nn.Module)), None)
    if name is None or not experts.is_plain or block.experts is not experts.module or "forward" in vars(block):
        raise ValueError(
            f"{experts.path} has no shared expert beside it that could be folded into it; patch it as it is"
        )
    shared, routed = getattr(block, name), experts.shape.experts
    gate, up, down = (getattr(shared, matrix).weight.detach() for matrix in MATRICES)
    count, rest = divmod(len(gate), experts.shape.intermediate)
    if rest or any(getattr(shared, matrix).bias is not None for matrix in MATRICES):
        raise ValueError(
            f"the shared expert beside {experts.path} is {len(gate)} wide, no multiple of "
            f"{experts.shape.intermediate}, or has biases; patch the model as it is"
        )
    tried = torch.randn(1, TRIED_TOKENS, experts.shape.hidden, device=gate.device, dtype=gate.dtype)
    with torch.no_grad():
        before = block(tried)
    own = experts.module
    rows = torch.cat([gate.unflatten(0, (count, -1)), up.unflatten(0, (count, -1))], dim=1)
    columns = down.unflatten(1, (count, -1)).transpose(0, 1)
    wider = [torch.cat([own.gate_up_proj.detach(), rows]), torch.cat([own.down_proj.detach(), columns])]
    for weight, value in zip(("gate_up_proj", "down_proj"), wider, strict=True):
        _put(own, weight, value)
    own.num_experts = routed + count
    delattr(block, name)
    for matrix in MATRICES:
        getattr(shared, matrix).weight = None
    block.folded_experts = routed, count
    block.forward = MethodType(_routed_and_shared, block)
    folded = Folded(block, name, shared, routed)
    _check_same(block, tried, before, folded)
    return folded


def _check_same(block: nn.Module, tried: Tensor, before: Tensor, folded: Folded) -> None:
    try:
        with torch.no_grad():
            error = (block(tried) - before).abs().max() / before.abs().max()
        same = bool(error <= TOLERANCE[tried.dtype])
    except (TypeError, ValueError, AttributeError):
        same = False
    except BaseException:
        unfold_shared_experts([folded])
        raise
    if not same:
        unfold_shared_experts([folded])
        raise ValueError(
            f"{type(block).__name__} uses its shared expert in a way that is not known here; patch the model as it is"
        )


def _routed_and_shared(block: nn.Module, hidden_states: Tensor) -> Tensor:
    """The block's forward with its shared expert among the experts: one function for all layers, so that whoever
    compiles them one by one compiles it once."""
    first, count = block.folded_experts
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, ids = block.gate(tokens)
    gate: Callable[[Tensor], Tensor] | None = getattr(block, GATE, None)
    share = weights.new_ones(len(tokens), 1) if gate is None else torch.sigmoid(gate(tokens)).to(weights.dtype)
    always = torch.arange(first, first + count, dtype=ids.dtype, device=ids.device)
    ids = torch.cat([ids, always.expand(len(tokens), count)], dim=1)
    weights = torch.cat([weights, share.expand(len(tokens), count)], dim=1)
    return block.experts(tokens, ids, weights).view(hidden_states.shape)


def _put(module: nn.Module, name: str, weight: Tensor) -> None:
    trainable = getattr(module, name) is not None and getattr(module, name).requires_grad
    module.register_parameter(name, nn.Parameter(weight.contiguous(), requires_grad=trainable))
