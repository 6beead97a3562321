"""MoE layers of random weights at true model shapes, made and dequantized on the GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedweight.kernels.call import Call
from pagedweight.kernels.device_order import (
    PlaneGeometry,
    choose_frame_bytes,
    plane_geometry,
    row_words,
    stored_columns,
)
from pagedweight.kernels.launch import join_codebooks
from pagedweight.kernels.reference import combine

SHAPES = {  # hidden, intermediate, experts, experts per token
    "qwen": (2048, 1408, 60, 4),
    "mixtral": (4096, 14336, 8, 2),
    "gemma": (2816, 704, 128, 8),
    "odd": (1132, 364, 5, 3),  # tails of 4 and 12 words, columns that fill no word
}


class Gate(NamedTuple):
    """What stands between the two products, as `fused_moe` takes it; biases: of both products."""

    activation: str = "silu"
    gated: bool = True
    limit: float = 0.0
    biases: bool = False


class GpuLayer:
    """One layer's planes in frames at random places, tables of the committed widths, and statistics."""

    def __init__(self, shape: str, device: str, frames: str = "framed", planes: int = 6, gated: bool = True) -> None:
        self.hidden, self.intermediate, self.experts, self.choices = SHAPES[shape]
        self.device = device
        self.matrices = [((1 + gated) * self.intermediate, self.hidden), (self.hidden, self.intermediate)]
        self.planes = planes
        largest = max(-(-rows // 16) * 64 * row_words(columns) for rows, columns in self.matrices)
        sizes = {"framed": choose_frame_bytes(self.matrices), "whole": -(-largest // 128) * 128}
        self.frame_bytes = int(frames) if frames.isdigit() else sizes[frames]
        self.geometries = [plane_geometry(*matrix, self.frame_bytes) for matrix in self.matrices]
        rows, count = 2 * self.experts, max(g.frames for g in self.geometries)
        self.bits = torch.empty(rows, dtype=torch.int32, device=device)
        self.frame_address = torch.empty(rows, planes, count, dtype=torch.int64, device=device)
        self.table_address = torch.empty(rows, dtype=torch.int64, device=device)
        self.mass = torch.zeros(1, 1, self.experts, device=device)
        self.counts = torch.zeros(1, 1, self.experts, dtype=torch.int32, device=device)
        self.features = torch.zeros(1, 1, self.experts, 2, 3, device=device)
        self.biases = [torch.zeros(self.experts, height, device=device) for height, _columns in self.matrices]
        self.frames = torch.empty(0, dtype=torch.int32, device=device)

    @classmethod
    def meta(cls, shape: str, frames: str = "framed", planes: int = 6, gated: bool = True) -> GpuLayer:
        """Shapes and dtypes alone, to compile for."""
        return cls(shape, "meta", frames, planes, gated)

    @classmethod
    def random(
        cls, shape: str, seed: int, device: str = "cuda", frames: str = "framed", planes: int = 6, gated: bool = True
    ) -> GpuLayer:
        """frames: "framed", "whole" for one frame a plane, or a frame's bytes."""
        layer = cls(shape, device, frames, planes, gated)
        generator = torch.Generator(device).manual_seed(seed)
        for bias in layer.biases:
            bias.normal_(generator=generator)
        held = [g.frames * layer.planes for g in layer.geometries]
        total = layer.experts * sum(held)
        words = (total, layer.frame_bytes // 4)
        layer.frames = torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device=device, generator=generator)
        order = torch.randperm(total, device=device, generator=generator)
        used = 0
        for row in range(2 * layer.experts):
            g = layer.geometries[row % 2]
            chosen = order[used : used + held[row % 2]].view(layer.planes, g.frames)
            layer.frame_address[row, :, : g.frames] = layer.frames.data_ptr() + chosen * layer.frame_bytes
            used += held[row % 2]
        layer.generator = generator
        return layer

    def call(
        self, batch: tuple[torch.Tensor, ...], widths: tuple[int, ...], codebooks: tuple[str, ...], gate: Gate
    ) -> Call:
        """fused_moe's arguments for a batch as `routing` makes it."""
        tables = (self.bits, self.frame_address, self.table_address, self.frames.view(torch.uint8))
        sizes = (0, 0, self.experts, self.intermediate, self.frame_bytes)
        books = join_codebooks(dict(zip(widths, codebooks, strict=True)), widths)
        biases = self.biases if gate.biases else (None, None)
        settings = (gate.activation, list(widths), books, gate.gated, gate.limit, *biases)
        return Call(*batch, *tables, self.mass, self.counts, self.features, *sizes, *settings)

    def commit(self, widths: tuple[int, ...], codebooks: tuple[str, ...], seed: int) -> None:
        """Draw a width for every linear-block and fill its table."""
        picks = torch.randint(0, len(widths), (2 * self.experts,), generator=torch.Generator().manual_seed(seed))
        self.row_widths = [widths[int(pick)] for pick in picks]
        self.row_codebooks = [codebooks[int(pick)] for pick in picks]
        self.bits.copy_(torch.tensor(self.row_widths, dtype=torch.int32))
        self.row_tables = [self._table(row) for row in range(2 * self.experts)]
        self.table_address.copy_(torch.tensor([table.data_ptr() for table in self.row_tables]))

    def _table(self, row: int) -> torch.Tensor:
        bits, codebook, rows = self.row_widths[row], self.row_codebooks[row], self.matrices[row % 2][0]
        options = {"device": self.device, "generator": self.generator}
        if codebook == "lut16":
            return (torch.randn(rows, 1 << bits, **options) * 0.02).half()
        scale = 0.01 + 0.02 * torch.rand(rows, 1, **options)
        if codebook == "lut8":
            entries = torch.randint(0, 128, (rows, 1 << bits), dtype=torch.uint8, **options)
            return torch.cat([entries, (scale / 64).view(torch.uint8)], 1)
        if codebook == "affine":
            return torch.cat([scale / (1 << (bits - 1)), 0.002 * torch.randn(rows, 1, **options)], 1)
        return (torch.randn(rows, 4, **options) * 0.02).half()

    def bytes_read(self, ids: torch.Tensor) -> int:
        """Plane and table bytes of the distinct experts."""
        total = 0
        for expert in set(ids.flatten().tolist()):
            for row in (2 * expert, 2 * expert + 1):
                n, k = self.matrices[row % 2]
                total += n * k * self.row_widths[row] // 8 + self.row_tables[row].nbytes
        return total

    def dense(self, row: int) -> torch.Tensor:
        """(N, K) fp64 weights of a linear-block."""
        g = self.geometries[row % 2]
        codes = torch.zeros(g.rows, g.columns, dtype=torch.int64, device=self.device)
        for plane in range(self.row_widths[row]):
            numbers = (self.frame_address[row, plane, : g.frames] - self.frames.data_ptr()) // self.frame_bytes
            codes = 2 * codes + plane_bits(self.frames[numbers], g)
        table, bits, codebook = self.row_tables[row], self.row_widths[row], self.row_codebooks[row]
        if codebook == "lut16":
            return table.double().gather(1, codes)
        if codebook == "lut8":
            scale = table[:, -4:].contiguous().view(torch.float32).double()
            return scale * (table[:, :-4].double() - 64).gather(1, codes)
        u = codes.double() - (1 << (bits - 1))
        if codebook == "affine":
            return table[:, :1].double() * (u + 0.5) + table[:, 1:].double()
        c3, c2, c1, c0 = table.double().unsqueeze(-1).unbind(1)
        v = u / (1 << (bits - 1))
        return ((c3 * v + c2) * v + c1) * v + c0


def plane_bits(frames: torch.Tensor, g: PlaneGeometry) -> torch.Tensor:
    """(N, K) int64 bits of one plane from its frames (F, words)."""
    rows, first = [], 0
    for words in [16] * g.full_blocks + [g.tail_words] * (g.tail_words > 0):
        size = g.rows_per_frame * words
        rows.append(frames[:, first : first + size].reshape(-1, words))
        first += size
    words = torch.cat(rows, 1)[: g.rows]
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    plain = torch.zeros(g.rows, words.shape[1] * 32 + 512, dtype=torch.int64, device=words.device)
    plain[:, torch.as_tensor(stored_columns(g.columns).copy(), device=words.device)] = bits.flatten(1).long()
    return plain[:, : g.columns]


def routing(layer: GpuLayer, tokens: int, number: int, dtype: torch.dtype, met: int | None = None):
    """(x, ids, weights, slots) of the number-th call; for one token, successive calls take other experts.

    met: how many distinct experts the call takes; None leaves it to chance.
    """
    generator = torch.Generator().manual_seed(1000 + number)
    if tokens == 1:
        order = torch.randperm(layer.experts, generator=torch.Generator().manual_seed(7))
        first = (number // 2 * layer.choices) % (layer.experts - layer.choices + 1)
        ids = order[first : first + layer.choices][None]
    else:
        ids = _drawn_ids(layer, tokens, generator)
        while met is not None and len(ids.unique()) != met:
            ids = _drawn_ids(layer, tokens, generator)
    weights = torch.rand(tokens, layer.choices, generator=generator) + 0.1
    weights = weights / weights.sum(1, keepdim=True)
    x = torch.randn(tokens, layer.hidden, generator=generator).to(dtype)
    slots = torch.zeros(tokens, dtype=torch.int32)
    return tuple(tensor.to(layer.device) for tensor in (x, ids, weights, slots))


def _drawn_ids(layer: GpuLayer, tokens: int, generator: torch.Generator) -> torch.Tensor:
    drawn = [torch.randperm(layer.experts, generator=generator)[: layer.choices] for _ in range(tokens)]
    return torch.stack(drawn)


def dense_output(
    layer: GpuLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate: Gate | None = None
) -> torch.Tensor:
    """The layer's output in fp64; gate: silu with a gate and without biases by default."""
    gate = gate or Gate()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in set(ids.flatten().tolist()):
        token, choice = torch.where(ids == expert)
        first = x[token].double() @ layer.dense(2 * expert).T + gate.biases * layer.biases[0][expert]
        h = combine(first, gate.activation, gate.gated, gate.limit)
        second = h @ layer.dense(2 * expert + 1).T + gate.biases * layer.biases[1][expert]
        out.index_add_(0, token, second * weights[token, choice, None].double())
    return out
