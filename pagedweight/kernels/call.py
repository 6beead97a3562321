"""What pagedweight::fused_moe takes, named once: the op's schema, its checks and every path read it from here."""

from __future__ import annotations

import inspect
from typing import NamedTuple, get_type_hints

import torch

from pagedweight.kernels.launch import split_codebooks
from pagedweight.layout import BlockTables, RoutingStats

WRITTEN = ("mass", "counts", "features")


class Call(NamedTuple):
    """One MoE layer's routed experts over paged planes, for one batch.

    x: (T, H) fp32, fp16 or bf16; any strides.
    expert_ids: (T, A) int32 or int64; ids outside [0, E) add nothing and are not counted.
    expert_weights: (T, A) routing weights r, floating point.
    token_slot: (T,) int32 request slots; -1 is not counted.
    bits, frame_address, table_address, memory: layout.BlockTables; read on the device, never from the host.
    mass, counts, features: layout.RoutingStats, added to.
    layer_index: the layer's place in the statistics; first_row: the table row of (expert 0, gate_up).
    experts, intermediate: E and I. frame_bytes: size of a frame. activation: one of layout.ACTIVATIONS.
    widths: supported widths, ascending. codebooks: theirs, as `launch.join_codebooks` makes it.
    gated: whether gate_up has gate rows before its up rows. limit: of the activations in layout.LIMITED, else 0.
    gate_up_bias: b, (E, 2I), or (E, I) without a gate; down_bias: c, (E, H); floating point, contiguous, or None.
    """

    x: torch.Tensor
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor
    token_slot: torch.Tensor
    bits: torch.Tensor
    frame_address: torch.Tensor
    table_address: torch.Tensor
    memory: torch.Tensor
    mass: torch.Tensor
    counts: torch.Tensor
    features: torch.Tensor
    layer_index: int
    first_row: int
    experts: int
    intermediate: int
    frame_bytes: int
    activation: str
    widths: list[int]
    codebooks: str
    gated: bool = True
    limit: float = 0.0
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def tables(self) -> BlockTables:
        return BlockTables(self.bits, self.frame_address, self.table_address, self.memory)

    @property
    def stats(self) -> RoutingStats:
        return RoutingStats(self.mass, self.counts, self.features)

    @property
    def books(self) -> tuple[str, ...]:
        """The codebook of every width. ValueError when there is not one for each, or one cannot serve its width."""
        return split_codebooks(self.codebooks, self.widths)

    def with_batch(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, token_slot: torch.Tensor
    ) -> Call:
        """The same layer for another batch."""
        return Call(x, expert_ids, expert_weights, token_slot, *self[4:])

    def tokens(self, part: slice) -> Call:
        """The call for some of the batch's tokens."""
        return self.with_batch(*(tensor[part] for tensor in self[:4]))


def op_schema() -> str:
    """The schema of an op that takes a Call's fields and returns a tensor."""

    def prototype() -> None:
        """Only its signature is read."""

    types, defaults = get_type_hints(Call), Call._field_defaults
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    prototype.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, default=defaults.get(name, none), annotation=types[name]) for name in types],
        return_annotation=torch.Tensor,
    )
    return torch.library.infer_schema(prototype, mutates_args=WRITTEN)
