"""Shared by all tests: tolerances, one comparison, and MoE layers of random codes placed in a poisoned arena."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from pagedweight.bitplane import table_values
from pagedweight.kernels.call import Call
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry, row_words, to_device_order
from pagedweight.kernels.launch import LaunchConfig, join_codebooks
from pagedweight.kernels.reference import fused_moe_reference
from pagedweight.layout import BlockTables, MoeLayer, Projection, RoutingStats, table_bytes

# Maximum error relative to the reference's maximum. 16-bit types round the operands of every product once.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}

GARBAGE = 0xFF  # as fp16 a NaN, as a plane all ones
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Fails unless |actual - expected| <= TOLERANCES[dtype] * max |expected| everywhere; NaN never passes."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return
    limit = TOLERANCES[dtype or actual.dtype] * expected.double().abs().max()
    error = (actual.double() - expected.double()).abs().max()
    assert error <= limit, f"error {error:.3e} is above {limit:.3e}"


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    if activation == "relu2":
        return gate.clamp(min=0) ** 2
    return torch.nn.functional.gelu(gate, approximate="tanh")


def combine(product: torch.Tensor, shape: MoeLayer) -> torch.Tensor:
    """What down takes in, number by number where the activation has a limit; (2I,) or, without a gate, (I,)."""
    if not shape.gated:
        return activate(product, shape.activation)
    gate, up = product.chunk(2)
    if not shape.limit:
        return activate(gate, shape.activation) * up
    return torch.tensor(
        [_limited(g, u, shape) for g, u in zip(gate.tolist(), up.tolist(), strict=True)], dtype=product.dtype
    )


def _limited(gate: float, up: float, shape: MoeLayer) -> float:
    limit = shape.limit
    up = max(-limit, min(up, limit))
    if shape.activation == "capped_silu":
        return min(gate / (1 + math.exp(-gate)), limit) * up
    gate = min(gate, limit)
    if shape.activation == "clamped_silu":
        return gate / (1 + math.exp(-gate)) * up
    return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)


class Layer(NamedTuple):
    """One MoE layer's codes and tables. codes: by table row, (N, K) parent codes; tables: by row, by width."""

    shape: MoeLayer
    widths: tuple[int, ...]
    frame_bytes: int
    first_row: int
    codes: list[torch.Tensor]
    tables: list[dict[int, torch.Tensor]]
    codebooks: dict[int, str]
    biases: dict[str, torch.Tensor]

    def weight(self, row: int, bits: int) -> torch.Tensor:
        """(N, K) fp64 values of one linear-block at a width."""
        codes = self.codes[row] >> (self.widths[-1] - bits)
        return table_values(self.tables[row][bits], bits).double().gather(1, codes.long())

    def dense(self, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up (E, 2I, H) and down (E, H, I) in fp64 at committed widths bits (2E,)."""
        rows = [self.weight(row, int(b)) for row, b in enumerate(bits)]
        return torch.stack(rows[0::2]), torch.stack(rows[1::2])

    def moe(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, bits: torch.Tensor
    ) -> torch.Tensor:
        """The layer's answer in fp64, token by token."""
        gate_up, down = self.dense(bits)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, (ids, weights) in enumerate(zip(expert_ids.tolist(), expert_weights.double(), strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                if 0 <= expert < self.shape.experts:
                    product = gate_up[expert] @ x[token].double()
                    if "gate_up_bias" in self.biases:
                        product += self.biases["gate_up_bias"][expert].double()
                    output = down[expert] @ combine(product, self.shape)
                    if "down_bias" in self.biases:
                        output += self.biases["down_bias"][expert].double()
                    out[token] += weight * output
        return out

    def place(
        self,
        bits: torch.Tensor,
        seed: int = 0,
        *,
        spare_frames: int = 3,
        garbage: int = GARBAGE,
        padding: int = 0,
        device: torch.device = DEVICE,
    ) -> BlockTables:
        """Writes the committed planes and tables into an arena of shuffled frames; everything else is garbage.

        Addresses of planes above a committed width point at a garbage frame. padding: the bit of padding positions.
        """
        generator = torch.Generator().manual_seed(seed)
        geometries = [plane_geometry(*codes.shape, self.frame_bytes) for codes in self.codes]
        sizes = [table_bytes(self.codebooks[int(b)], len(c), int(b)) for c, b in zip(self.codes, bits, strict=True)]
        runs = [-(-size // self.frame_bytes) for size in sizes]
        planes = sum(g.frames * int(b) for g, b in zip(geometries, bits, strict=True))
        memory = aligned_bytes((sum(runs) + planes + spare_frames) * self.frame_bytes, garbage)
        order = sum(runs) + torch.randperm(planes + spare_frames, generator=generator)
        spare, taken = order[:spare_frames], spare_frames

        rows = self.first_row + len(self.codes)
        parent_width, most_frames = self.widths[-1], max(g.frames for g in geometries)
        tables = BlockTables(
            torch.zeros(rows, dtype=torch.int32),
            self.frame_bytes * spare[0].repeat(rows, parent_width, most_frames),
            torch.zeros(rows, dtype=torch.int64),
            memory,
        )
        slot_order = torch.randperm(len(runs), generator=generator).tolist()
        slots = self.frame_bytes * torch.tensor([0] + [runs[i] for i in slot_order]).cumsum(0)
        offsets = dict(zip(slot_order, slots.tolist(), strict=False))
        for i, (geometry, width) in enumerate(zip(geometries, bits.tolist(), strict=True)):
            row = self.first_row + i
            frames = order[taken : taken + width * geometry.frames].reshape(width, geometry.frames)
            taken += frames.numel()
            pages = to_device_order(pack(self.codes[i], parent_width)[:width], geometry)
            if padding:
                ones = torch.full((len(self.codes[i]), -(-geometry.columns // 32)), -1, dtype=torch.int32)
                pages |= ~to_device_order(ones, geometry)
            memory.view(-1, self.frame_bytes)[frames] = pages.reshape(width, geometry.frames, -1)
            tables.frame_address[row, :width, : geometry.frames] = self.frame_bytes * frames
            table = self.tables[i][width].contiguous().view(-1).view(torch.uint8)
            memory[offsets[i] : offsets[i] + len(table)] = table
            tables.table_address[row] = offsets[i]
            tables.bits[row] = width
        if device.type != "cpu":
            tables = BlockTables(*(tensor.to(device) for tensor in tables))
        tables.frame_address.add_(tables.memory.data_ptr())
        tables.table_address.add_(tables.memory.data_ptr())
        return tables

    def arguments(self, tables: BlockTables, stats: RoutingStats, layer_index: int = 0) -> dict[str, object]:
        """The keyword arguments of fused_moe that describe this layer."""
        return {
            **tables._asdict(),
            **stats._asdict(),
            "layer_index": layer_index,
            "first_row": self.first_row,
            "experts": self.shape.experts,
            "intermediate": self.shape.intermediate,
            "frame_bytes": self.frame_bytes,
            "activation": self.shape.activation,
            "widths": list(self.widths),
            "codebooks": join_codebooks(self.codebooks, self.widths),
            "gated": self.shape.gated,
            "limit": self.shape.limit,
            **{name: bias.to(tables.memory.device) for name, bias in self.biases.items()},
        }


def make_layer(
    experts: int,
    hidden: int,
    intermediate: int,
    widths: tuple[int, ...] = (2, 3, 4, 5, 6),
    *,
    activation: str = "silu",
    seed: int = 0,
    first_row: int = 0,
    frame_bytes: int | None = None,
    codebooks: dict[int, str] | None = None,
    gated: bool = True,
    limit: float = 0.0,
    biases: bool | torch.dtype = False,
) -> Layer:
    """A layer of random codes and tables, scaled so that outputs are near 1; codebooks: lut16 where not given.

    biases: False, or both in fp32 (True) or in the type given.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = MoeLayer(0, experts, hidden, intermediate, activation, gated, limit)
    books = {b: (codebooks or {}).get(b, "lut16") for b in widths}
    codes, tables = [], []
    for _ in range(experts):
        for projection in Projection:
            n, k = shape.shape(projection)
            codes.append(torch.randint(0, 2 ** widths[-1], (n, k), generator=generator, dtype=torch.uint8))
            tables.append({b: random_table(books[b], n, b, k**-0.5, generator) for b in widths})
    chosen = frame_bytes or choose_frame_bytes([shape.shape(projection) for projection in Projection])
    heights = {"gate_up_bias": shape.shape(Projection.GATE_UP)[0], "down_bias": hidden} if biases else {}
    dtype = torch.float32 if biases is True else biases
    drawn = {name: torch.randn(experts, height, generator=generator).to(dtype) for name, height in heights.items()}
    return Layer(shape, widths, chosen, first_row, codes, tables, books, drawn)


def random_table(codebook: str, rows: int, bits: int, size: float, generator: torch.Generator) -> torch.Tensor:
    """A table of rows that differ, whose values are of about the given size."""
    if codebook == "lut16":
        return (torch.randn(rows, 2**bits, generator=generator) * size).half()
    scale = size * (0.5 + torch.rand(rows, 1, generator=generator))
    if codebook == "lut8":
        octets = torch.randint(0, 128, (rows, 2**bits), generator=generator, dtype=torch.uint8)
        return torch.cat([octets, (scale / 37).view(torch.uint8)], 1)
    if codebook == "affine":
        return torch.cat([scale / 2 ** (bits - 1), size * torch.randn(rows, 1, generator=generator)], 1)
    return (torch.randn(rows, 4, generator=generator) * size).half()


def draw_bits(layer: Layer, seed: int = 0) -> torch.Tensor:
    """(2E,) committed widths, any supported width for each linear-block."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(layer.widths), (len(layer.codes),), generator=generator)
    return torch.tensor(layer.widths, dtype=torch.int32)[chosen]


def draw_routing(
    tokens: int, experts: int, per_token: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, A) int64 distinct expert ids and (T, A) positive weights that sum to 1 per token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :per_token]
    weights = torch.rand(tokens, per_token, generator=generator) + 0.1
    return ids.contiguous(), (weights / weights.sum(1, keepdim=True)).to(dtype)


def draw_tokens(tokens: int, hidden: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Outcome(NamedTuple):
    """What one call of fused_moe returned and added to statistics that began at zero, on the CPU."""

    out: torch.Tensor
    stats: RoutingStats


def zero_slots(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, dtype=torch.int32)


def run_kernel(
    layer: Layer,
    tables: BlockTables,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor | None = None,
    *,
    slots: int = 1,
    spare_experts: int = 0,
    config: LaunchConfig | None = None,
) -> Outcome:
    """The grouped kernels: on the GPU where there is one, else interpreted, in tiles as large as the layer.

    spare_experts: that the statistics hold beyond the layer's.
    """
    from pagedweight.kernels.fused_moe import launch_fused_moe

    if config is None and DEVICE.type == "cpu":
        config = one_tile(layer)
    launch = partial(launch_fused_moe, config=config)
    return _run(launch, layer, tables, x, expert_ids, expert_weights, token_slot, slots, spare_experts)


def run_twin(
    layer: Layer,
    tables: BlockTables,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor | None = None,
    *,
    slots: int = 1,
    spare_experts: int = 0,
) -> Outcome:
    return _run(fused_moe_reference, layer, tables, x, expert_ids, expert_weights, token_slot, slots, spare_experts)


def _run(
    launch: Callable[[Call], torch.Tensor],
    layer: Layer,
    tables: BlockTables,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor | None,
    slots: int,
    spare_experts: int,
) -> Outcome:
    device = tables.memory.device
    token_slot = zero_slots(len(x)) if token_slot is None else token_slot
    stats = RoutingStats.zeros(slots, 2, layer.shape.experts + spare_experts, device)
    batch = (tensor.to(device) for tensor in (x, expert_ids, expert_weights, token_slot))
    out = launch(Call(*batch, **layer.arguments(tables, stats, layer_index=1)))
    return Outcome(out.cpu(), RoutingStats(*(tensor.cpu() for tensor in stats)))


def one_tile(layer: Layer) -> LaunchConfig:
    """Tiles as large as the layer: the interpreter pays by the program, not by the element."""
    rows = max(2 * layer.shape.intermediate, layer.shape.hidden, 32)
    words = row_words(max(layer.shape.intermediate, layer.shape.hidden))
    return LaunchConfig(block_n=min(256, _power_of_two(rows)), words=min(16, _power_of_two(words)))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """(N, K) codes as (width, N, ceil(K / 32)) int32 planes in plain order, most significant plane first."""
    bits = codes[None].long() >> torch.arange(width - 1, -1, -1)[:, None, None] & 1
    padded = torch.nn.functional.pad(bits, (0, -codes.shape[1] % 32)).reshape(width, len(codes), -1, 32)
    return (padded << torch.arange(32)).sum(-1).to(torch.int32)


def aligned_bytes(size: int, value: int) -> torch.Tensor:
    """uint8 (size,) filled with `value`, starting at a multiple of 128 bytes as device memory does."""
    raw = torch.full((size + 128,), value, dtype=torch.uint8)
    offset = -raw.data_ptr() % 128
    return raw[offset : offset + size]
