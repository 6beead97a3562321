"""Random linear-blocks of one MoE layer in an arena of frames, with their dense weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedweight.bitplane import pack_codes, table_values, unpack_codes
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry, to_device_order
from pagedweight.layout import BlockTables, MoeLayer, Projection, RoutingStats


class Layer(NamedTuple):
    """An MoE layer's tables as kernels read them; `dense` is fp64 (N, K) by table row, at the committed width."""

    shape: MoeLayer
    tables: BlockTables
    frame_bytes: int
    widths: tuple[int, ...]
    codebooks: tuple[str, ...]
    dense: list[torch.Tensor]


def random_table(rows: int, bits: int, codebook: str, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(rows, 1 << bits, generator=generator) * 0.05
    if codebook == "lut16":
        return normal.to(torch.float16)
    scale = 0.01 + 0.02 * torch.rand(rows, 1, generator=generator)
    if codebook == "lut8":
        entries = torch.randint(0, 128, (rows, 1 << bits), generator=generator, dtype=torch.uint8)
        return torch.cat([entries, (scale / 64).view(torch.uint8)], 1)
    if codebook == "affine":
        return torch.cat([scale / (1 << (bits - 1)), 0.1 * normal[:, :1]], 1)
    return (torch.randn(rows, 4, generator=generator) * 0.05).to(torch.float16)


def random_layer(
    shape: MoeLayer,
    widths: tuple[int, ...],
    committed: torch.Tensor,
    codebooks: tuple[str, ...] | None = None,
    seed: int = 0,
    frame_bytes: int | None = None,
    poison: int = 0xFF,
) -> Layer:
    """committed: int (2 E,) width of every row. Frames lie in random order; all that no plane or table owns is
    `poison`, and so are planes at and above the committed width."""
    generator = torch.Generator().manual_seed(seed)
    codebooks = codebooks or ("lut16",) * len(widths)
    shapes = [shape.shape(projection) for _ in range(shape.experts) for projection in Projection]
    frame_bytes = frame_bytes or choose_frame_bytes(shapes)
    planes = widths[-1]
    geometries = [plane_geometry(*matrix, frame_bytes) for matrix in shapes]
    frames = max(geometry.frames for geometry in geometries)
    tables, dense, pages = [], [], []
    for row, (rows, columns) in enumerate(shapes):
        bits = int(committed[row])
        codes = torch.randint(0, 1 << planes, (rows, columns), generator=generator, dtype=torch.uint8)
        packed = pack_codes(codes, planes)
        table = random_table(rows, bits, codebooks[widths.index(bits)], generator)
        values = table_values(table, bits).double()
        dense.append(values.gather(1, unpack_codes(packed, columns, bits).long()))
        tables.append(table.contiguous().view(torch.uint8).flatten())
        pages.append(to_device_order(packed, geometries[row]).view(planes, -1, frame_bytes)[:bits])
    plane_count = sum(page.shape[0] * page.shape[1] for page in pages)
    table_frames = [-(-table.numel() // frame_bytes) for table in tables]
    memory = torch.full(((plane_count + sum(table_frames) + 2) * frame_bytes + 128,), poison, dtype=torch.uint8)
    base = memory.data_ptr() + (-memory.data_ptr()) % 128
    view = memory[base - memory.data_ptr() :][: (plane_count + sum(table_frames) + 2) * frame_bytes].view(
        -1, frame_bytes
    )
    frame_address = torch.full((len(shapes), planes, frames), -1, dtype=torch.int64)
    table_address = torch.zeros(len(shapes), dtype=torch.int64)
    order = torch.randperm(plane_count, generator=generator) + sum(table_frames) + 1
    used, table_frame = 0, 1
    for row, page in enumerate(pages):
        count = page.shape[0] * page.shape[1]
        chosen = order[used : used + count]
        view[chosen] = page.reshape(count, frame_bytes)
        frame_address[row, : page.shape[0], : page.shape[1]] = (base + chosen * frame_bytes).view(page.shape[:2])
        view.view(-1)[table_frame * frame_bytes :][: tables[row].numel()] = tables[row]
        table_address[row] = base + table_frame * frame_bytes
        used, table_frame = used + count, table_frame + table_frames[row]
    block_tables = BlockTables(committed.to(torch.int32), frame_address, table_address, memory)
    return Layer(shape, block_tables, frame_bytes, widths, codebooks, dense)


def reference(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's output in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    gelu = lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")  # noqa: E731
    activate = torch.nn.functional.silu if layer.shape.activation == "silu" else gelu
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            if 0 <= expert < layer.shape.experts:
                gate, up = (layer.dense[2 * expert] @ x[token].double()).chunk(2)
                out[token] += weight * (layer.dense[2 * expert + 1] @ (activate(gate) * up))
    return out


def zero_stats(layer: Layer, slots: int = 1) -> RoutingStats:
    return RoutingStats.zeros(slots, 1, layer.shape.experts)
