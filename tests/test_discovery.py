"""Modules that share names or parts with routed experts and are something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pagedweight.discovery import find_experts


def parameters(**shapes: tuple[int, ...]) -> nn.Module:
    """A module of random parameters."""
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


def named(name: str, module: nn.Module, **attributes: object) -> nn.Module:
    """The module as one of another class, with more to it."""
    module.__class__ = type(name, (nn.Module,), attributes)
    return module


def fused(**attributes: object) -> nn.Module:
    """What fused experts have, but for what the attributes say."""
    whole = {"num_experts": 2, "_apply_gate": lambda self, products: products.chunk(2, dim=-1)[1], **attributes}
    return named("Experts", parameters(gate_up_proj=(2, 8, 4), down_proj=(2, 4, 4)), **whole)


def holding(module: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"mlp": module})])
    return model


NOTHING = r"^Module has no routed experts that are served"
LOOKALIKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a gate that needs what is not there": (
        lambda: fused(_apply_gate=lambda self, products: self.act_fn(products)),
        r"^layers\.0\.mlp combines gate and up in a way of its own \(AttributeError: .*act_fn.*\); leave this model",
    ),
    "a gate that takes something else": (
        lambda: fused(_apply_gate=lambda self, gate, up: gate * up),
        r"in a way of its own \(TypeError: ",
    ),
    "a gate that gives no tensor": (
        lambda: fused(_apply_gate=lambda self, products: None),
        r"in a way of its own \(TypeError: ",
    ),
    "a gate that is a switch": (lambda: fused(_apply_gate=True), NOTHING),
    "experts that are listed": (lambda: fused(num_experts=[0, 1]), NOTHING),
    "no experts": (lambda: fused(num_experts=0), NOTHING),
    "no activation where there is no gate": (
        lambda: named(
            "Experts",
            parameters(up_proj=(2, 8, 4), down_proj=(2, 4, 8)),
            num_experts=2,
            has_gate=False,
            _apply_gate=lambda self, products: products,
        ),
        r"activates experts without a gate in a way of its own \(AttributeError: ",
    ),
    "Dbrx by name alone": (lambda: named("DbrxExperts", nn.Module()), NOTHING),
    "Dbrx with other layers": (
        lambda: named("DbrxExperts", nn.ModuleDict({"mlp": nn.ModuleDict({"w1": nn.Linear(2, 2)})}), num_experts=2),
        NOTHING,
    ),
    "Dbrx without an activation": (
        lambda: named(
            "DbrxExperts", nn.ModuleDict({"mlp": parameters(w1=(4, 2), v1=(4, 2), w2=(4, 2))}), num_experts=2
        ),
        r"in a way of its own \(AttributeError: .*activation_fn",
    ),
    "Llama 4 by name alone": (lambda: named("Llama4TextExperts", nn.Module(), num_experts=2), NOTHING),
    "Llama 4 of matrices": (
        lambda: named("Llama4TextExperts", parameters(gate_up_proj=(4, 8), down_proj=(4, 4)), num_experts=2),
        NOTHING,
    ),
}


def test_two_models_in_one_are_refused() -> None:
    """Such as a model that speaks and one that listens: their layers have the same numbers."""
    gated = {
        "_apply_gate": lambda self, products: nn.functional.silu(products.chunk(2, -1)[0]) * products.chunk(2, -1)[1]
    }
    both = nn.ModuleDict({name: holding(fused(**gated)) for name in ("talker", "thinker")})
    with pytest.raises(ValueError, match=r"talker\.layers\.0\.mlp and thinker\.layers\.0\.mlp are both layer 0; patch"):
        find_experts(both)


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_what_only_looks_like_experts_is_one_sentence(kind: str) -> None:
    make, says = LOOKALIKES[kind]
    with pytest.raises(ValueError, match=says):
        find_experts(holding(make()))
