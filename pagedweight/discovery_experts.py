"""One MoE layer's experts where they stand in a model: their shape, and their weights in one form for all families."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagedweight.discovery_storage import FusedStorage, Storage
from pagedweight.experts import PagedExperts
from pagedweight.integrations.hf_llama4 import routed_forward
from pagedweight.layout import MoeLayer, Projection


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
        return all(_found(self.module, name) is not None for name in self.storage.names)

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
            vars(self.block).pop("forward", None)

    def put_weights(self, gate_up: Tensor, down: Tensor) -> None:
        """New weights of the shapes of weights(), in the dtype of the old ones."""
        self.storage.write(self.module, gate_up.to(self.dtype), down.to(self.dtype), self.trainable)


def _found(module: nn.Module, name: str) -> nn.Parameter | None:
    holder, _, own = name.rpartition(".")
    return getattr(module.get_submodule(holder), own, None)
