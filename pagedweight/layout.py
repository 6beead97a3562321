"""The shared vocabulary: what a linear-block is, how rows are numbered, and the tensors that layers hand each other.

Dimension letters, used everywhere: T tokens, A experts per token, E experts, L MoE layers, R linear-blocks (table
rows), H hidden, I intermediate, N x K a linear-block's rows x columns, P parent width (planes), F frames per plane,
R_s request slots.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import torch

CODEBOOKS = ("lut16", "lut8", "cubic", "affine")
# What stands between an expert's two matrices; kernels.reference.combine is the definition.
ACTIVATIONS = ("silu", "gelu_tanh", "relu2", "clamped_silu", "capped_silu", "gpt_oss")
LIMITED = ("clamped_silu", "capped_silu", "gpt_oss")
UNGATED = ("silu", "gelu_tanh", "relu2")
MAX_WIDTH = 8
LUT8_MAX_WIDTH = 4
CUBIC_MIN_WIDTH = 3  # four coefficients are four free values: at 2 bits that is lut16


class Projection(enum.IntEnum):
    """Which of an expert's two matrices a linear-block is (the paper's u)."""

    GATE_UP = 0
    DOWN = 1

    @property
    def label(self) -> str:
        return ("gate_up", "down")[self]


class BlockId(NamedTuple):
    """A linear-block i = (layer, expert, projection); the layer number is the model's own."""

    layer: int
    expert: int
    projection: Projection

    def __str__(self) -> str:
        return f"layers.{self.layer}.experts.{self.expert}.{self.projection.label}"


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE layer's shape: E experts of H -> (2I) -> I -> H; `layer` is the model's own number.

    gated: without a gate, gate_up has I rows. limit: where the activations in LIMITED clamp, 0 for the others.
    """

    layer: int
    experts: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    gated: bool = True
    limit: float = 0.0

    def __post_init__(self) -> None:
        for name in ("experts", "hidden", "intermediate"):
            if getattr(self, name) < 1:
                raise ValueError(f"layer {self.layer}: {name} is {getattr(self, name)}; it must be at least 1")
        try:
            check_activation(self.activation, self.gated, self.limit)
        except ValueError as error:
            raise ValueError(f"layer {self.layer}: {error}") from error

    def shape(self, projection: Projection) -> tuple[int, int]:
        """(N, K) of one expert's matrix: gate_up is (2I, H) with the gate rows first, down is (H, I)."""
        if projection is Projection.GATE_UP:
            return (1 + self.gated) * self.intermediate, self.hidden
        return self.hidden, self.intermediate


def normalized_widths(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Sorted unique widths; TypeError when they are no ints, ValueError when empty or outside 2..8."""
    if not all(isinstance(width, Integral) for width in widths):
        raise TypeError(f"widths are {tuple(widths)}; give ints, as (2, 3, 4)")
    unique = tuple(sorted(set(widths)))
    if not unique or unique[0] < 2 or unique[-1] > MAX_WIDTH:
        raise ValueError(f"widths are {tuple(widths)}; give at least one width, each from 2 to {MAX_WIDTH}")
    return unique


def check_activation(activation: str, gated: bool, limit: float) -> None:
    """ValueError when experts cannot have this activation with or without a gate, or not with this limit."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; supported are {', '.join(ACTIVATIONS)}")
    if not gated and activation not in UNGATED:
        raise ValueError(f"activation {activation!r} needs a gate; without one use {', '.join(UNGATED)}")
    if not (0 < limit < math.inf if activation in LIMITED else limit == 0):
        raise ValueError(
            f"activation {activation!r} with limit {limit}; give {', '.join(LIMITED)} a finite limit above 0 and the "
            "others 0"
        )


def check_codebook(codebook: str, width: int) -> None:
    """ValueError when a codebook cannot serve a width."""
    if codebook not in CODEBOOKS:
        raise ValueError(f"codebook of {width} bits is {codebook!r}; use one of {', '.join(CODEBOOKS)}")
    if codebook == "lut8" and width > LUT8_MAX_WIDTH:
        raise ValueError(f"lut8 at {width} bits; it serves up to {LUT8_MAX_WIDTH} bits, use cubic or affine above")
    if codebook == "cubic" and width < CUBIC_MIN_WIDTH:
        raise ValueError(f"cubic at {width} bits; it serves {CUBIC_MIN_WIDTH} bits and more, use lut16 or lut8 below")


def table_form(codebook: str, width: int) -> tuple[torch.dtype, int]:
    """(dtype, entries per row) of a width's table, on the host and, row after row, in a table slot.

    `pagedweight.bitplane.table_values` says what the entries mean.
    """
    forms = {
        "lut16": (torch.float16, 1 << width),
        "lut8": (torch.uint8, (1 << width) + 4),
        "cubic": (torch.float16, 4),
        "affine": (torch.float32, 2),
    }
    return forms[codebook]


def table_bytes(codebook: str, rows: int, width: int) -> int:
    """Bytes of the table of a linear-block of `rows` rows."""
    dtype, entries = table_form(codebook, width)
    return rows * entries * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Every linear-block of a model, in table-row order: by layer, then expert, then projection.

    widths: supported bitwidths B_i, ascending; the last is the parent width P, the first the floor.
    codebooks: codebook name by width.
    """

    moe_layers: tuple[MoeLayer, ...]
    widths: tuple[int, ...]
    codebooks: Mapping[int, str]

    def __post_init__(self) -> None:
        if not self.moe_layers:
            raise ValueError("the layout has no MoE layer; it needs at least one")
        if self.widths != normalized_widths(self.widths):
            raise ValueError(f"widths are {self.widths}; give them sorted, without repeats")
        missing = [b for b in self.widths if self.codebooks.get(b) not in CODEBOOKS]
        if missing:
            raise ValueError(f"widths {missing} have no known codebook; use one of {', '.join(CODEBOOKS)}")
        for width in self.widths:
            check_codebook(self.codebooks[width], width)

    @property
    def parent_width(self) -> int:
        return self.widths[-1]

    @property
    def floor_width(self) -> int:
        return self.widths[0]

    @property
    def rows(self) -> int:
        """R, the number of linear-blocks."""
        return 2 * sum(layer.experts for layer in self.moe_layers)

    def first_row(self, layer_index: int) -> int:
        """The table row of (expert 0, gate_up) of the layer_index-th MoE layer."""
        return 2 * sum(layer.experts for layer in self.moe_layers[:layer_index])

    def blocks(self) -> Iterator[BlockId]:
        """Every linear-block in row order."""
        for layer in self.moe_layers:
            for expert in range(layer.experts):
                for projection in Projection:
                    yield BlockId(layer.layer, expert, projection)

    def row_shapes(self) -> list[tuple[int, int]]:
        """(N, K) of every row."""
        return [
            layer.shape(projection)
            for layer in self.moe_layers
            for _ in range(layer.experts)
            for projection in Projection
        ]

    def row(self, block: BlockId) -> int:
        """The table row of a linear-block; KeyError when the layout has no such block."""
        first = 0
        for layer in self.moe_layers:
            if layer.layer == block.layer:
                if not 0 <= block.expert < layer.experts:
                    break
                return first + 2 * block.expert + int(block.projection)
            first += 2 * layer.experts
        raise KeyError(f"{block} is not in the layout")

    def weights(self) -> int:
        """Number of routed expert weights."""
        return sum(n * k for n, k in self.row_shapes())


class PackedBlock(NamedTuple):
    """A linear-block on the host, in the checkpoint's plain order.

    planes: (P, N, ceil(K / 32)) int32 holding uint32 words; plane 0 is the most significant bit; bit j of word w is
    column 32 w + j; bits beyond K are zero.
    tables: by width b, (N, entries) as `table_form` has it; for lut16 entry c is the value of code c.
    columns: K.
    """

    planes: torch.Tensor
    tables: dict[int, torch.Tensor]
    columns: int


class BlockTables(NamedTuple):
    """What kernels read to find a linear-block. The runtime writes these in place, in compute-stream order.

    bits: int32 (R,), the committed width.
    frame_address: int64 (R, P, F), absolute addresses of the frames of each plane; entries of planes at or above the
        committed width may be anything.
    table_address: int64 (R,), absolute address of the committed width's table.
    memory: uint8 (bytes,), the arena that every address points into.
    """

    bits: torch.Tensor
    frame_address: torch.Tensor
    table_address: torch.Tensor
    memory: torch.Tensor


class RoutingStats(NamedTuple):
    """What kernels add to and the runtime reads. One request slot when no requests are known.

    mass: fp32 (R_s, L, E), sum of routing weights r.
    counts: int32 (R_s, L, E), routed tokens.
    features: fp32 (R_s, L, E, 2, 3), for gate_up and down inputs x: sum r |x|, sum r |x|^2, max |x| (2-norms).
    """

    mass: torch.Tensor
    counts: torch.Tensor
    features: torch.Tensor

    @classmethod
    def zeros(cls, slots: int, layers: int, experts: int, device: torch.device | str = "cpu") -> RoutingStats:
        return cls(
            torch.zeros(slots, layers, experts, dtype=torch.float32, device=device),
            torch.zeros(slots, layers, experts, dtype=torch.int32, device=device),
            torch.zeros(slots, layers, experts, 2, 3, dtype=torch.float32, device=device),
        )
