"""A call of the decode path as launches: two to four kernels with their arguments, and the scratch they share."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.config import (
    GENERIC,
    DecodeConfig,
    Hardware,
    ProductConfig,
    Workload,
    choose,
    problem,
)
from pagedweight.kernels.decode.digits import SEGMENT, _quantize_h_kernel
from pagedweight.kernels.decode.down import _down_kernel
from pagedweight.kernels.decode.gate_up import _gate_up_kernel
from pagedweight.kernels.decode.prepare import _prepare_kernel
from pagedweight.kernels.decode.slots import PLAN_HEADER
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.kernels.launch import cdiv, power_of_two, shared_limit
from pagedweight.kernels.weighted_sum import sum_launch, weighted_sum_kernel

SUM_COLUMNS = 512
# Triton 3.9 moves them through shared memory; of 3.7 and 3.8 nothing is known.
_INT8_IN_REGISTERS = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6)


class Launch(NamedTuple):
    """One kernel launch; arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments)


def decode_launches(
    call: Call, config: DecodeConfig | None = None, use_ptx: bool | None = None
) -> tuple[torch.Tensor, list[Launch]]:
    """(the output, the launches that fill it), in order; arguments as `launch_decode_moe`'s."""
    # Kernels read x, ids and weights as they lie; the rest is contiguous already.
    x, ids, weights = call.x.contiguous(), call.expert_ids.contiguous(), call.expert_weights.contiguous()
    call = call.with_batch(x, ids, weights, call.token_slot)
    launches = _Launches(call, _chosen(call, config), has_ptx(call.x) if use_ptx is None else use_ptx)
    order = [launches.gate_up(), launches.down()]
    if launches.planned:
        order.insert(0, launches.prepare())
        if launches.config.int8:
            order.insert(2, launches.quantize_h())
    if launches.config.separate_sum:
        order.append(launches.weighted_sum())
    if launches.config.early_launch:
        for launch in order:
            launch.arguments["launch_pdl"] = True
    return launches.out, order


def _chosen(call: Call, config: DecodeConfig | None) -> DecodeConfig:
    """The settings given, or the table's. ValueError when they cannot run."""
    (tokens, hidden), choices = call.x.shape, call.expert_ids.shape[1]
    work = Workload(tokens, choices, call.experts, hidden, call.intermediate, tuple(call.widths), call.books)
    hardware = _hardware(call.x)
    config = choose(work, hardware) if config is None else config
    reason = problem(config, work, hardware)
    if reason is not None:
        raise ValueError(reason)
    return config


def _hardware(x: torch.Tensor) -> Hardware:
    if not x.is_cuda:
        return GENERIC
    early_launch = torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return Hardware(shared_limit(x.device), early_launch, _INT8_IN_REGISTERS)


def has_ptx(x: torch.Tensor) -> bool:
    """Whether kernels may be written in PTX: compiled ones, on NVIDIA's GPUs from Ampere on."""
    return (
        x.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and not isinstance(_gate_up_kernel, InterpretedFunction)
    )


def _settings(product: ProductConfig) -> dict[str, int]:
    settings = {
        "ROWS": product.rows,
        "CHUNKS": product.chunks,
        "STAGES": product.stages,
        "WARPS": product.warps,
        "num_warps": product.warps,
    }
    return settings if product.registers is None else settings | {"maxnreg": product.registers}


class _Digits:
    """Room for the int8 digits of a matrix's rows; next to none where they are not used."""

    def __init__(self, x: torch.Tensor, orders: int, used: bool) -> None:
        self.row = 512 * cdiv(x.shape[1], 512)
        self.segments = cdiv(self.row, SEGMENT.value)
        rows, row = (len(x), self.row) if used else (1, 1)
        self.digits = torch.empty((rows, orders, 2, row), dtype=torch.int8, device=x.device)
        self.scales = torch.empty((rows, 2), dtype=torch.float32, device=x.device)

    def arguments(self) -> dict[str, torch.Tensor]:
        return {"digits_ptr": self.digits, "scales_ptr": self.scales}


class _Launches:
    """The launches of one call of contiguous inputs, over scratch of its own."""

    def __init__(self, call: Call, config: DecodeConfig, use_ptx: bool) -> None:
        self.call, self.config, self.use_ptx = call, config, use_ptx
        self.codebooks = call.books
        self.tokens, self.hidden = call.x.shape
        self.choices = call.expert_ids.shape[1]
        self.pairs = self.tokens * self.choices
        self.planned = self.tokens > 1 or self.config.prepared
        self.slots = min(self.pairs, call.experts + self.pairs // self.config.tokens)
        self.down_tiles = cdiv(self.hidden, self.config.down.rows)
        # Digit orders of the widths: codes that are looked up, codes that are numbers.
        self.orders = tuple(sorted({int(codebook == "affine") for codebook in self.codebooks}))
        self.out = torch.empty_like(call.x)
        self.h = call.x.new_empty((self.pairs, call.intermediate))
        digits = self.config.int8 and self.planned
        self.x_digits = _Digits(call.x, len(self.orders), digits)
        parts = (self.pairs, self.config.down.splits, self.hidden)
        self.parts = torch.empty(parts, dtype=torch.float32, device=call.x.device)
        self.h_digits = _Digits(self.h, len(self.orders), digits)

    @cached_property
    def common(self) -> dict[str, Any]:
        """What the launches before the products take too."""
        plan = (self.slots, PLAN_HEADER.value + self.config.tokens) if self.planned else (1, 1)
        return {
            "ids_ptr": self.call.expert_ids,
            "plan_ptr": self._integers(plan),
            "tokens": self.tokens,
            "EXPERTS": self.call.experts,
            "CHOICES": self.choices,
            "TOKENS": self.config.tokens,
            "ORDERS": self.orders,
            "INT8": self.config.int8,
            "PDL": self.config.early_launch,
        }

    @cached_property
    def products(self) -> dict[str, Any]:
        """What both products take."""
        call = self.call
        return self.common | {
            "h_ptr": self.h,
            "out_ptr": self.out,
            "weights_ptr": call.expert_weights,
            "slot_ptr": call.token_slot,
            "bits_ptr": call.bits,
            "frame_ptr": call.frame_address,
            "table_ptr": call.table_address,
            "features_ptr": call.features,
            "arrivals_ptr": self._integers((self.tokens, self.down_tiles)),
            "first_row": call.first_row,
            "layer": call.layer_index,
            "layers": call.mass.shape[1],
            "request_slots": call.mass.shape[0],
            "counted_experts": call.mass.shape[2],
            "HIDDEN": self.hidden,
            "INTERMEDIATE": call.intermediate,
            "PADDED": power_of_two(self.choices),
            "PLANES": call.frame_address.shape[1],
            "PLANE_FRAMES": call.frame_address.shape[2],
            "WIDTHS": tuple(call.widths),
            "CODEBOOKS": self.codebooks,
            "PLANNED": self.planned,
            "PTX": self.use_ptx,
        }

    def prepare(self) -> Launch:
        experts = self.call.experts
        arguments = self.common | self.x_digits.arguments()
        arguments |= {
            "x_ptr": self.call.x,
            "slot_count": self.slots,
            "HIDDEN": self.hidden,
            "PAIRS": power_of_two(self.pairs),
            "SLOTS": power_of_two(self.slots),
            "BINS": power_of_two(experts + 1),
            "ROW": self.x_digits.row,
        }
        quantizing = self.tokens * self.x_digits.segments if self.config.int8 else 0
        return Launch(_prepare_kernel, (experts + quantizing,), arguments)

    def gate_up(self) -> Launch:
        call, product = self.call, self.config.gate_up
        parts = 2 if call.gated else 1
        arguments = self.products | self.x_digits.arguments() | _settings(product)
        arguments |= {
            "x_ptr": call.x,
            "mass_ptr": call.mass,
            "counts_ptr": call.counts,
            "ARRIVALS": self.down_tiles,
            "FRAME_ROWS": plane_geometry(parts * call.intermediate, self.hidden, call.frame_bytes).rows_per_frame,
            "ACTIVATION": call.activation,
            "GATED": call.gated,
            "LIMIT": call.limit,
        }
        arguments |= self._bias(call.gate_up_bias) | self._room(2 * product.rows * product.chunks)
        programs = self.tokens + self.slots * cdiv(parts * call.intermediate, 2 * product.rows)
        return Launch(_gate_up_kernel, (programs,), arguments)

    def quantize_h(self) -> Launch:
        arguments = {name: self.common[name] for name in ("ids_ptr", "EXPERTS", "ORDERS", "PDL")}
        arguments |= self.h_digits.arguments()
        arguments |= {"h_ptr": self.h, "COLUMNS": self.call.intermediate, "ROW": self.h_digits.row}
        return Launch(_quantize_h_kernel, (self.pairs, self.h_digits.segments), arguments)

    def down(self) -> Launch:
        call, product = self.call, self.config.down
        arguments = self.products | self.h_digits.arguments() | _settings(product)
        arguments |= {
            "parts_ptr": self.parts,
            "FRAME_ROWS": plane_geometry(self.hidden, call.intermediate, call.frame_bytes).rows_per_frame,
            "SPLITS": product.splits,
            "SEPARATE_SUM": self.config.separate_sum,
            "EARLY_ROUTING": self.config.early_routing and not self.config.separate_sum,
        }
        arguments |= self._bias(call.down_bias) | self._room(product.rows * product.chunks)
        return Launch(_down_kernel, (self.tokens + self.slots * self.down_tiles * product.splits,), arguments)

    def weighted_sum(self) -> Launch:
        call, early = self.call, self.config.early_launch
        parts = (self.parts, call.expert_ids, call.expert_weights, self.out, call.experts)
        return Launch(weighted_sum_kernel, *sum_launch(*parts, SUM_COLUMNS, early))

    def _room(self, operand_rows: int) -> dict[str, int]:
        room = self.config.room_bytes(operand_rows, tuple(self.call.widths), self.codebooks)
        return {"ROOM": room if self.use_ptx else 0}

    def _bias(self, bias: torch.Tensor | None) -> dict[str, Any]:
        return {"bias_ptr": self.call.bits if bias is None else bias, "BIAS": bias is not None}

    def _integers(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.call.x.device)
