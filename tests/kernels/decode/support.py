"""Layers of tests/support.py with a width for every linear-block, run by the decode launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.config import DecodeConfig, ProductConfig
from pagedweight.kernels.decode.launch import launch_decode_moe
from pagedweight.layout import BlockTables, MoeLayer, RoutingStats
from tests import support
from tests.support import DEVICE, combine, draw_bits, draw_tokens, make_layer

# Few, large programs: each costs the interpreter about the same.
ONE = DecodeConfig(ProductConfig(rows=32), ProductConfig(rows=64), tokens=1)
MANY = DecodeConfig(ProductConfig(rows=32), ProductConfig(rows=64), tokens=4)


class Placed(NamedTuple):
    """A layer in a poisoned arena; bits: (2E,) committed widths."""

    layer: support.Layer
    bits: torch.Tensor
    tables: BlockTables

    @property
    def shape(self) -> MoeLayer:
        return self.layer.shape

    @property
    def widths(self) -> tuple[int, ...]:
        return self.layer.widths

    @property
    def codebooks(self) -> tuple[str, ...]:
        return tuple(self.layer.codebooks[width] for width in self.widths)

    @property
    def frame_bytes(self) -> int:
        return self.layer.frame_bytes

    @property
    def biases(self) -> dict[str, torch.Tensor]:
        return {name: bias.to(DEVICE) for name, bias in self.layer.biases.items()}


class Batch(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor


def random_layer(
    shape: MoeLayer,
    widths: tuple[int, ...],
    codebooks: tuple[str, ...] = (),
    seed: int = 0,
    placement: int = 0,
    poison: int = support.GARBAGE,
    biases: tuple[str, ...] = (),
) -> Placed:
    """codebooks: by width, else lut16. placement orders the frames; poison fills all that nothing owns, which includes
    the planes above the committed width. biases: names of those that the layer has."""
    layer = make_layer(
        shape.experts, shape.hidden, shape.intermediate, widths, activation=shape.activation, seed=seed,
        codebooks=dict(zip(widths, codebooks, strict=False)), gated=shape.gated, limit=shape.limit, biases=bool(biases),
    )  # fmt: skip
    layer = layer._replace(biases={name: layer.biases[name] for name in biases})
    bits = draw_bits(layer, seed)
    return Placed(layer, bits, layer.place(bits, placement, garbage=poison))


def random_batch(placed: Placed, tokens: int, choices: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Batch:
    shape = placed.layer.shape
    ids, weights = support.draw_routing(tokens, shape.experts, choices, seed)
    x = draw_tokens(tokens, shape.hidden, seed, dtype)
    return Batch(*(tensor.to(DEVICE) for tensor in (x, ids, weights, support.zero_slots(tokens))))


def run(
    placed: Placed, batch: Batch, config: DecodeConfig | None = None, stats: RoutingStats | None = None
) -> torch.Tensor:
    stats = stats or RoutingStats.zeros(1, 1, placed.layer.shape.experts, device=DEVICE)
    return launch_decode_moe(Call(*batch, **placed.layer.arguments(placed.tables, stats)), config)


def hidden_of(placed: Placed, x: torch.Tensor, expert: int) -> torch.Tensor:
    """(I,) fp64: the input of an expert's down projection, where there are no biases."""
    weight = placed.layer.weight(2 * expert, int(placed.bits[2 * expert]))
    return combine(weight @ x.double().cpu(), placed.layer.shape)


def reference(placed: Placed, batch: Batch) -> torch.Tensor:
    """The layer's output in fp64."""
    x, ids, weights, _slots = (tensor.cpu() for tensor in batch)
    return placed.layer.moe(x, ids, weights, placed.bits).to(DEVICE)
