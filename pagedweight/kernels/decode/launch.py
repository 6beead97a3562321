"""Host side of the decode path: two launches, three when several tokens must be grouped by expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from pagedweight.kernels.decode.config import (
    GENERIC,
    MAX_TOKENS,
    DecodeConfig,
    Hardware,
    ProductConfig,
    Workload,
    check_codebooks,
    choose,
    problem,
)
from pagedweight.kernels.decode.digits import SEGMENT, _quantize_h_kernel
from pagedweight.kernels.decode.down import _down_kernel
from pagedweight.kernels.decode.gate_up import _gate_up_kernel
from pagedweight.kernels.decode.prepare import _prepare_kernel
from pagedweight.kernels.decode.slots import PLAN_HEADER
from pagedweight.kernels.device_order import plane_geometry


class Launch(NamedTuple):
    """One kernel launch; arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments)


def can_decode(x: torch.Tensor) -> bool:
    """Whether this path serves the batch: at most 64 tokens in a 16-bit type."""
    return 0 < x.shape[0] <= MAX_TOKENS and x.dtype in (torch.float16, torch.bfloat16)


def launch_decode_moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor,
    bits: torch.Tensor,
    frame_address: torch.Tensor,
    table_address: torch.Tensor,
    memory: torch.Tensor,
    mass: torch.Tensor,
    counts: torch.Tensor,
    features: torch.Tensor,
    layer_index: int,
    first_row: int,
    experts: int,
    intermediate: int,
    frame_bytes: int,
    activation: str,
    widths: tuple[int, ...],
    codebooks: tuple[str, ...] | None = None,
    config: DecodeConfig | None = None,
    use_ptx: bool | None = None,
) -> torch.Tensor:
    """out[t] = sum_a r[t, a] expert_{id[t, a]}(x[t]) for up to 64 tokens; adds to mass, counts and features.

    Arguments as `fused_moe`'s. codebooks: one per width, lut16 by default. use_ptx: decode with inline PTX; by default
    on NVIDIA GPUs from Ampere on. Workspace comes from torch's allocator; nothing waits for the host.
    """
    out, launches = decode_launches(
        x, expert_ids, expert_weights, token_slot, bits, frame_address, table_address, mass, counts, features,
        layer_index, first_row, experts, intermediate, frame_bytes, activation, widths, codebooks, config, use_ptx,
    )  # fmt: skip
    for launch in launches:
        launch.run()
    return out


def decode_launches(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    token_slot: torch.Tensor,
    bits: torch.Tensor,
    frame_address: torch.Tensor,
    table_address: torch.Tensor,
    mass: torch.Tensor,
    counts: torch.Tensor,
    features: torch.Tensor,
    layer_index: int,
    first_row: int,
    experts: int,
    intermediate: int,
    frame_bytes: int,
    activation: str,
    widths: tuple[int, ...],
    codebooks: tuple[str, ...] | None = None,
    config: DecodeConfig | None = None,
    use_ptx: bool | None = None,
) -> tuple[torch.Tensor, list[Launch]]:
    """(the output, the launches that fill it), in order; ValueError when the settings cannot run."""
    widths = tuple(widths)
    codebooks = ("lut16",) * len(widths) if codebooks is None else tuple(codebooks)
    check_codebooks(widths, codebooks)
    x = x.contiguous()
    tokens, hidden = x.shape
    choices = expert_ids.shape[1]
    work = Workload(tokens, choices, experts, hidden, intermediate, widths, codebooks)
    config = choose(work, _hardware(x)) if config is None else config
    reason = problem(config, work, _hardware(x))
    if reason is not None:
        raise ValueError(reason)
    pairs, planned = tokens * choices, tokens > 1 or config.prepared
    slots = min(pairs, experts + pairs // config.tokens)
    down_tiles = triton.cdiv(hidden, config.down.rows)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty((pairs, intermediate), dtype=x.dtype, device=x.device)
    integers = {"dtype": torch.int32, "device": x.device}
    # Digit orders of the widths: codes that are looked up, codes that are numbers.
    orders = tuple(sorted({int(codebook == "affine") for codebook in codebooks})) if config.int8 else (0,)
    x_digits = _Digits(x, orders, config.int8 and planned)
    h_digits = _Digits(h, orders, config.int8 and planned)
    common = {
        "ids_ptr": expert_ids.contiguous(),
        "plan_ptr": torch.empty((slots, PLAN_HEADER.value + config.tokens) if planned else (1, 1), **integers),
        "tokens": tokens,
        "EXPERTS": experts,
        "CHOICES": choices,
        "TOKENS": config.tokens,
        "ORDERS": orders,
        "INT8": config.int8,
        "PDL": config.early_launch,
    }
    products = common | {
        "h_ptr": h,
        "out_ptr": out,
        "weights_ptr": expert_weights.contiguous(),
        "slot_ptr": token_slot,
        "bits_ptr": bits,
        "frame_ptr": frame_address,
        "table_ptr": table_address,
        "features_ptr": features,
        "arrivals_ptr": torch.empty((tokens, down_tiles), **integers),
        "first_row": first_row,
        "layer": layer_index,
        "layers": mass.shape[1],
        "counted_experts": mass.shape[2],
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "PADDED": triton.next_power_of_2(choices),
        "PLANES": frame_address.shape[1],
        "PLANE_FRAMES": frame_address.shape[2],
        "WIDTHS": widths,
        "CODEBOOKS": codebooks,
        "PLANNED": planned,
        "PTX": _has_ptx(x) if use_ptx is None else use_ptx,
    }
    gate_up = {
        "x_ptr": x,
        "digits_ptr": x_digits.digits,
        "scales_ptr": x_digits.scales,
        "mass_ptr": mass,
        "counts_ptr": counts,
        "ARRIVALS": down_tiles,
        "FRAME_ROWS": plane_geometry(2 * intermediate, hidden, frame_bytes).rows_per_frame,
        "ACTIVATION": activation,
    }
    down = {
        "digits_ptr": h_digits.digits,
        "scales_ptr": h_digits.scales,
        "parts_ptr": torch.empty((pairs, config.down.splits, hidden), dtype=torch.float32, device=x.device),
        "FRAME_ROWS": plane_geometry(hidden, intermediate, frame_bytes).rows_per_frame,
        "SPLITS": config.down.splits,
    }
    up_programs = tokens + slots * triton.cdiv(intermediate, config.gate_up.rows)
    down_programs = tokens + slots * down_tiles * config.down.splits
    launches = [
        Launch(_gate_up_kernel, (up_programs,), products | gate_up | _settings(config.gate_up)),
        Launch(_down_kernel, (down_programs,), products | down | _settings(config.down)),
    ]
    if config.int8 and planned:
        quantize = {key: common[key] for key in ("ids_ptr", "EXPERTS", "ORDERS", "PDL")}
        quantize |= {"h_ptr": h, "digits_ptr": h_digits.digits, "scales_ptr": h_digits.scales}
        quantize |= {"COLUMNS": intermediate, "ROW": h_digits.row}
        launches.insert(1, Launch(_quantize_h_kernel, (pairs, h_digits.segments), quantize))
    if planned:
        prepare = common | {
            "x_ptr": x,
            "digits_ptr": x_digits.digits,
            "scales_ptr": x_digits.scales,
            "slot_count": slots,
            "HIDDEN": hidden,
            "PAIRS": triton.next_power_of_2(pairs),
            "SLOTS": triton.next_power_of_2(slots),
            "BINS": triton.next_power_of_2(experts + 1),
            "ROW": x_digits.row,
        }
        programs = experts + config.int8 * tokens * x_digits.segments
        launches.insert(0, Launch(_prepare_kernel, (programs,), prepare))
    if config.early_launch:
        for launch in launches[1:]:
            launch.arguments["launch_pdl"] = True
    return out, launches


class _Digits:
    """Room for the int8 digits of a matrix's rows; empty where they are not used."""

    def __init__(self, x: torch.Tensor, orders: tuple[int, ...], used: bool) -> None:
        rows, columns = x.shape if used else (1, 1)
        self.row = 512 * triton.cdiv(x.shape[1], 512)
        self.segments = triton.cdiv(self.row, SEGMENT.value)
        shape = (rows, len(orders), 2, self.row if used else columns)
        self.digits = torch.empty(shape, dtype=torch.int8, device=x.device)
        self.scales = torch.empty((rows, 2), dtype=torch.float32, device=x.device)


def _settings(product: ProductConfig) -> dict[str, int]:
    settings = {
        "ROWS": product.rows,
        "CHUNKS": product.chunks,
        "STAGES": product.stages,
        "WARPS": product.warps,
        "num_warps": product.warps,
    }
    return settings if product.registers is None else settings | {"maxnreg": product.registers}


def _has_ptx(x: torch.Tensor) -> bool:
    return (
        x.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and not isinstance(_gate_up_kernel, InterpretedFunction)
    )


def _hardware(x: torch.Tensor) -> Hardware:
    if not x.is_cuda or torch.version.hip is not None:
        return GENERIC
    properties = torch.cuda.get_device_properties(x.device)
    return Hardware(properties.shared_memory_per_block_optin, properties.major >= 9)
