"""One MoE layer of a real model's shape, drawn on the device: random planes in shuffled frames, random tables."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedweight.kernels.call import Call
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry, stored_columns
from pagedweight.kernels.launch import join_codebooks
from pagedweight.kernels.reference import GATES, decode_blocks, routing_reference, to_stored_order
from pagedweight.layout import BlockTables, MoeLayer, Projection, RoutingStats


class Batch(NamedTuple):
    """x: (T, H) fp32, exact in bf16 and fp16 too. ids: int64 (T, A). weights: fp32 (T, A). slot: int32 (T,)."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slot: torch.Tensor

    def head(self, tokens: int) -> Batch:
        return Batch(*(tensor[:tokens] for tensor in self))


class GpuLayer:
    """One MoE layer's tables and statistics on a device, with `set_bits` to commit widths.

    Every frame holds random bytes from the start, so a frame address is a plane and moving it changes weights.
    """

    def __init__(self, name: str, shape: MoeLayer, widths: tuple[int, ...], device: str = "cuda") -> None:
        self.name, self.shape, self.widths = name, shape, widths
        sizes = [shape.shape(projection) for projection in Projection]
        self.frame_bytes = choose_frame_bytes(sizes)
        self.geometry = [plane_geometry(*size, self.frame_bytes) for size in sizes]
        rows = 2 * shape.experts
        self.run_frames = [-(-2 * n * 2 ** widths[-1] // self.frame_bytes) for n, _ in sizes]
        self.table_frames = shape.experts * sum(self.run_frames)
        self.plane_frames = shape.experts * widths[-1] * sum(g.frames for g in self.geometry)
        total = self.table_frames + self.plane_frames
        self.generator = torch.Generator(device).manual_seed(0)
        memory = torch.empty(total * self.frame_bytes, dtype=torch.uint8, device=device)
        for piece in memory.split(1 << 30):
            piece.random_(0, 256, generator=self.generator)
        self.tables = BlockTables(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, widths[-1], max(g.frames for g in self.geometry), dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            memory,
        )
        self.stats = RoutingStats.zeros(1, 1, shape.experts, device)

    def mixed_bits(self, seed: int) -> torch.Tensor:
        """(2E,) committed widths, any supported one for each linear-block."""
        generator = torch.Generator().manual_seed(seed)
        return torch.tensor(self.widths)[
            torch.randint(0, len(self.widths), (2 * self.shape.experts,), generator=generator)
        ]

    def set_bits(self, bits: torch.Tensor, frame_seed: int = 0) -> None:
        """Commits widths, shuffles frames and draws new tables, all in place."""
        device = self.tables.memory.device
        generator = torch.Generator(device).manual_seed(frame_seed)
        order = self.table_frames + torch.randperm(self.plane_frames, device=device, generator=generator)
        entries = self.tables.memory[: self.table_frames * self.frame_bytes].view(torch.float16)
        entries.fill_(float("nan"))
        base, run, taken = self.tables.memory.data_ptr(), 0, 0
        self.tables.frame_address.zero_()  # planes above the committed width: reading one faults
        for row, width in enumerate(bits.tolist()):
            geometry, frames = self.geometry[row % 2], self.run_frames[row % 2]
            size = width * geometry.frames
            address = base + self.frame_bytes * order[taken : taken + size].view(width, geometry.frames)
            self.tables.frame_address[row, :width, : geometry.frames] = address
            first = run * self.frame_bytes // 2
            table = entries[first : first + geometry.rows * 2**width]
            table.normal_(generator=self.generator).mul_(geometry.columns**-0.5)
            self.tables.table_address[row] = base + run * self.frame_bytes
            taken, run = taken + size, run + frames
        self.tables.bits.copy_(bits)
        self.retired = order[taken:]

    def poison_retired_frames(self) -> None:
        """Ones in every frame that no committed plane is in."""
        self.tables.memory.view(-1, self.frame_bytes)[self.retired] = 0xFF

    def blocks(self, projection: Projection, experts: range) -> torch.Tensor:
        """(experts, N, 32 * words) fp32 weights in stored order."""
        rows = 2 * torch.tensor(list(experts), device=self.tables.bits.device) + projection
        return decode_blocks(self.tables, rows, self.geometry[projection], dict.fromkeys(self.widths, "lut16"))

    def keep_dense(self) -> None:
        """All weights in bf16, (E, 2I, H) and (E, H, I), for the baseline."""
        self.dense_gate_up, self.dense_down = (
            torch.cat([self._plain_block(projection, expert) for expert in range(self.shape.experts)])
            for projection in Projection
        )

    def _plain_block(self, projection: Projection, expert: int) -> torch.Tensor:
        columns = self.geometry[projection].columns
        # argsort of a permutation is its inverse; padding sorts last.
        position = torch.from_numpy(stored_columns(columns).argsort()[:columns].copy())
        block = self.blocks(projection, range(expert, expert + 1)).bfloat16()
        return block.index_select(2, position.to(block.device))

    def drop_dense(self) -> None:
        del self.dense_gate_up, self.dense_down

    def clear_statistics(self) -> None:
        for tensor in self.stats:
            tensor.zero_()

    def call(self, x: torch.Tensor, batch: Batch) -> Call:
        """fused_moe's arguments for a batch whose inputs are `x`."""
        sizes = (0, 0, self.shape.experts, self.shape.intermediate, self.frame_bytes)
        books = join_codebooks(dict.fromkeys(self.widths, "lut16"), self.widths)
        settings = (self.shape.activation, list(self.widths), books)
        return Call(x, batch.ids, batch.weights, batch.slot, *self.tables, *self.stats, *sizes, *settings)

    def expected_statistics(self, batch: Batch) -> RoutingStats:
        """What one batch adds to statistics that begin at zero, with norms in fp64."""
        norms = torch.zeros(batch.ids.shape, dtype=torch.float64, device=batch.x.device)
        dense_output(self, batch, norms)
        stats = RoutingStats.zeros(1, 1, self.shape.experts, batch.x.device)
        routing_reference(batch.ids, batch.weights, batch.slot, batch.x.norm(dim=-1), norms.float(), stats, 0)
        return stats


def draw_batch(layer: GpuLayer, tokens: int, per_token: int, seed: int) -> Batch:
    """Normal inputs, distinct experts for each token, weights that sum to 1; all in request slot 0."""
    device = layer.tables.memory.device
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, layer.shape.hidden, device=device, generator=generator).bfloat16().float()
    ids = torch.rand(tokens, layer.shape.experts, device=device, generator=generator).topk(per_token).indices
    weights = torch.rand(tokens, per_token, device=device, generator=generator) + 0.1
    weights = weights / weights.sum(1, keepdim=True)
    return Batch(x.half().float(), ids, weights, torch.zeros(tokens, dtype=torch.int32, device=device))


def dense_output(layer: GpuLayer, batch: Batch, norms: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's answer in fp64, expert by expert; fills `norms` (T, A) with the norms of down's inputs."""
    out = torch.zeros(batch.x.shape, dtype=torch.float64, device=batch.x.device)
    inputs = to_stored_order(batch.x.double())
    for expert in range(layer.shape.experts):
        token, choice = torch.where(batch.ids == expert)
        if not len(token):
            continue
        here = range(expert, expert + 1)
        gate, up = (inputs[token] @ layer.blocks(Projection.GATE_UP, here)[0].double().T).chunk(2, dim=-1)
        inner = GATES[layer.shape.activation](gate) * up
        if norms is not None:
            norms[token, choice] = inner.norm(dim=-1)
        answer = to_stored_order(inner) @ layer.blocks(Projection.DOWN, here)[0].double().T
        out.index_add_(0, token, answer * batch.weights[token, choice, None].double())
    return out
