"""Random linear-blocks of one MoE layer in a poisoned arena, in every codebook, with their dense weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedweight.bitplane import pack_codes, table_values, unpack_codes
from pagedweight.kernels.decode.config import DecodeConfig, ProductConfig
from pagedweight.kernels.decode.launch import launch_decode_moe
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry, to_device_order
from pagedweight.layout import BlockTables, MoeLayer, Projection, RoutingStats
from tests.support import DEVICE, combine

# Few, large programs: each costs the interpreter about the same.
ONE = DecodeConfig(ProductConfig(rows=32), ProductConfig(rows=64), tokens=1)
MANY = DecodeConfig(ProductConfig(rows=32), ProductConfig(rows=64), tokens=4)


class Layer(NamedTuple):
    """An MoE layer as kernels read it; dense: fp64 (N, K) by table row, at the committed width."""

    shape: MoeLayer
    tables: BlockTables
    frame_bytes: int
    widths: tuple[int, ...]
    codebooks: tuple[str, ...]
    dense: list[torch.Tensor]
    biases: dict[str, torch.Tensor]


class Batch(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor


def random_table(rows: int, bits: int, codebook: str, generator: torch.Generator) -> torch.Tensor:
    """A table in the checkpoint's form."""
    normal = torch.randn(rows, 1 << bits, generator=generator) * 0.3
    scale = 0.2 + 0.4 * torch.rand(rows, 1, generator=generator)
    if codebook == "lut16":
        return normal.to(torch.float16)
    if codebook == "lut8":
        entries = torch.randint(0, 128, (rows, 1 << bits), generator=generator, dtype=torch.uint8)
        return torch.cat([entries, (scale / 64).view(torch.uint8)], 1)
    if codebook == "affine":
        return torch.cat([scale / (1 << (bits - 1)), 0.1 * normal[:, :1]], 1)
    return (torch.randn(rows, 4, generator=generator) * 0.3).to(torch.float16)


def random_layer(
    shape: MoeLayer,
    widths: tuple[int, ...],
    codebooks: tuple[str, ...] | None = None,
    seed: int = 0,
    placement: int = 0,
    poison: int = 0xFF,
    biases: tuple[str, ...] = (),
) -> Layer:
    """Every linear-block at a width of its own. biases: names of those that the layer has. placement orders the frames;
    poison fills all that nothing owns, which includes the planes above the committed width."""
    generator = torch.Generator().manual_seed(seed)
    codebooks = codebooks or ("lut16",) * len(widths)
    matrices = [shape.shape(projection) for _ in range(shape.experts) for projection in Projection]
    frame_bytes = choose_frame_bytes(matrices)
    committed = torch.tensor(widths)[torch.randint(0, len(widths), (len(matrices),), generator=generator)]
    pages, tables, dense = [], [], []
    for matrix, bits in zip(matrices, committed.tolist(), strict=True):
        codes = torch.randint(0, 1 << widths[-1], matrix, generator=generator, dtype=torch.uint8)
        planes = pack_codes(codes, widths[-1])
        table = random_table(matrix[0], bits, codebooks[widths.index(bits)], generator)
        geometry = plane_geometry(*matrix, frame_bytes)
        pages.append(to_device_order(planes, geometry)[:bits].reshape(bits, geometry.frames, frame_bytes))
        tables.append(table.contiguous().view(torch.uint8).flatten())
        values = table_values(table, bits).double()
        dense.append(values.gather(1, unpack_codes(planes, matrix[1], bits).long()))
    placed = _place(pages, tables, frame_bytes, widths[-1], torch.Generator().manual_seed(placement), poison)
    bits = committed.to(torch.int32).to(DEVICE)
    rows = {"gate_up_bias": matrices[0][0], "down_bias": matrices[1][0]}
    drawn = {name: torch.randn(shape.experts, rows[name], generator=generator).to(DEVICE) for name in biases}
    return Layer(shape, BlockTables(bits, *placed), frame_bytes, widths, codebooks, dense, drawn)


def _place(
    pages: list[torch.Tensor],
    tables: list[torch.Tensor],
    frame_bytes: int,
    planes: int,
    generator: torch.Generator,
    poison: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(frame_address, table_address, memory): planes in single frames anywhere, tables in runs of frames."""
    table_frames = [-(-table.numel() // frame_bytes) for table in tables]
    plane_frames = [page.shape[0] * page.shape[1] for page in pages]
    total = sum(table_frames) + sum(plane_frames)
    arena = torch.full((total, frame_bytes), poison, dtype=torch.uint8)
    order = torch.randperm(sum(plane_frames), generator=generator) + sum(table_frames)
    frame_address = torch.full((len(pages), planes, max(page.shape[1] for page in pages)), -1, dtype=torch.int64)
    table_address = torch.zeros(len(pages), dtype=torch.int64)
    run = used = 0
    for row, (page, table) in enumerate(zip(pages, tables, strict=True)):
        chosen = order[used : used + plane_frames[row]]
        arena[chosen] = page.reshape(-1, frame_bytes)
        frame_address[row, : page.shape[0], : page.shape[1]] = (chosen * frame_bytes).view(page.shape[:2])
        arena.view(-1)[run * frame_bytes :][: table.numel()] = table
        table_address[row] = run * frame_bytes
        used, run = used + plane_frames[row], run + table_frames[row]
    memory = torch.full((total * frame_bytes + 128,), poison, dtype=torch.uint8, device=DEVICE)
    start = -memory.data_ptr() % 128
    memory[start : start + arena.numel()] = arena.flatten().to(DEVICE)
    base = memory.data_ptr() + start
    frame_address = torch.where(frame_address >= 0, frame_address + base, frame_address)
    return frame_address.to(DEVICE), (table_address + base).to(DEVICE), memory


def random_batch(layer: Layer, tokens: int, choices: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    experts = layer.shape.experts
    ids = torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)])
    x = torch.randn(tokens, layer.shape.hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, choices, generator=generator)
    return Batch(
        x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    )


def run(
    layer: Layer, batch: Batch, config: DecodeConfig | None = None, stats: RoutingStats | None = None
) -> torch.Tensor:
    shape = layer.shape
    stats = stats or RoutingStats.zeros(1, 1, shape.experts, device=DEVICE)
    return launch_decode_moe(
        *batch, *layer.tables, *stats, 0, 0, shape.experts, shape.intermediate, layer.frame_bytes, shape.activation,
        layer.widths, ",".join(layer.codebooks), shape.gated, shape.limit, config=config, **layer.biases,
    )  # fmt: skip


def hidden_of(layer: Layer, x: torch.Tensor, expert: int) -> torch.Tensor:
    """(I,) fp64: the input of an expert's down projection."""
    product = layer.dense[2 * expert] @ x.double().cpu()
    if "gate_up_bias" in layer.biases:
        product += layer.biases["gate_up_bias"][expert].double().cpu()
    return combine(product, layer.shape)


def reference(layer: Layer, batch: Batch) -> torch.Tensor:
    """The layer's output in fp64, expert by expert."""
    out = torch.zeros(batch.x.shape, dtype=torch.float64)
    for token in range(len(batch.x)):
        for expert, weight in zip(batch.ids[token].tolist(), batch.weights[token].tolist(), strict=True):
            if 0 <= expert < layer.shape.experts:
                output = layer.dense[2 * expert + 1] @ hidden_of(layer, batch.x[token], expert)
                if "down_bias" in layer.biases:
                    output += layer.biases["down_bias"][expert].double().cpu()
                out[token] += weight * output
    return out.to(DEVICE)
