"""How a model keeps its experts' matrices, and the one form in which everything else sees them.

That form: gate_up (E, 2I, H), gate rows first, or (E, I, H) without a gate; down (E, H, I); biases (E, rows of each).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pagedweight.experts import BIASES


class Storage(Protocol):
    """Reads and writes the matrices of an experts module; `names` are of parameters below it, weights only."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """(gate_up, down), views where the module's own form allows it."""
        ...

    def write(self, module: nn.Module, gate_up: Tensor, down: Tensor, trainable: bool) -> None: ...

    def read_biases(self, module: nn.Module) -> dict[str, Tensor]:
        """Those of BIASES that the module has."""
        ...

    def write_biases(self, module: nn.Module, biases: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class FusedStorage:
    """3-D parameters of the module itself, as transformers' fused experts have them.

    gate_up: the first one's name. transposed: both are kept as columns x rows. interleaved: gate and up rows alternate.
    """

    gate_up: str = "gate_up_proj"
    transposed: bool = False
    interleaved: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.gate_up, "down_proj"

    @property
    def bias_names(self) -> dict[str, str]:
        return dict(zip(BIASES, (f"{name}_bias" for name in self.names), strict=True))

    def read(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        gate_up, down = (self._turned(getattr(module, name).detach()) for name in self.names)
        return (gate_first(gate_up) if self.interleaved else gate_up), down

    def write(self, module: nn.Module, gate_up: Tensor, down: Tensor, trainable: bool) -> None:
        gate_up = alternating(gate_up) if self.interleaved else gate_up
        for name, weight in zip(self.names, (gate_up, down), strict=True):
            module.register_parameter(name, nn.Parameter(self._turned(weight).contiguous(), requires_grad=trainable))

    def read_biases(self, module: nn.Module) -> dict[str, Tensor]:
        found = {kind: getattr(module, name, None) for kind, name in self.bias_names.items()}
        biases = {kind: bias.detach() for kind, bias in found.items() if bias is not None}
        if self.interleaved and BIASES[0] in biases:
            biases[BIASES[0]] = gate_first(biases[BIASES[0]])
        return biases

    def write_biases(self, module: nn.Module, biases: dict[str, Tensor]) -> None:
        for kind, bias in biases.items():
            own = alternating(bias) if self.interleaved and kind == BIASES[0] else bias
            module.register_parameter(self.bias_names[kind], nn.Parameter(own, requires_grad=False))

    def _turned(self, weight: Tensor) -> Tensor:
        return weight.transpose(1, 2) if self.transposed else weight


@dataclass(frozen=True, slots=True)
class DbrxStorage:
    """w1, v1 and w2 of the module's `mlp`, each (E * I, H): gate, up, and down transposed."""

    experts: int

    @property
    def names(self) -> tuple[str, ...]:
        return "mlp.w1", "mlp.v1", "mlp.w2"

    def read(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        gate, up, down = (w.detach().unflatten(0, (self.experts, -1)) for w in self._weights(module))
        return torch.cat([gate, up], dim=1), down.transpose(1, 2)

    def write(self, module: nn.Module, gate_up: Tensor, down: Tensor, trainable: bool) -> None:
        gate, up = gate_up.chunk(2, dim=1)
        for name, weight in zip(("w1", "v1", "w2"), (gate, up, down.transpose(1, 2)), strict=True):
            own = nn.Parameter(weight.flatten(0, 1).contiguous(), requires_grad=trainable)
            module.mlp.register_parameter(name, own)

    def read_biases(self, module: nn.Module) -> dict[str, Tensor]:
        return {}

    def write_biases(self, module: nn.Module, biases: dict[str, Tensor]) -> None:
        """It has none."""

    def _weights(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        return module.mlp.w1, module.mlp.v1, module.mlp.w2


def gate_first(rows: Tensor) -> Tensor:
    """Alternating gate and up rows (dimension 1) with the gate rows first."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1)


def alternating(rows: Tensor) -> Tensor:
    """The inverse of gate_first."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)
