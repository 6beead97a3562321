"""What every path of fused_moe requires of its arguments, checked at the door."""

from __future__ import annotations

import torch

from pagedweight.kernels.call import Call
from pagedweight.kernels.launch import split_codebooks
from pagedweight.layout import BlockTables, RoutingStats, check_activation

INPUT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_TYPES = (torch.int32, torch.int64)


def check_arguments(call: Call) -> None:
    """ValueError, in one sentence, for the first of fused_moe's arguments that does not fit the others."""
    _check_batch(call.x, call.expert_ids, call.expert_weights, call.token_slot)
    check_activation(call.activation, call.gated, call.limit)
    split_codebooks(call.codebooks, call.widths)
    experts, device = call.experts, call.x.device
    if call.expert_ids.shape[1] > experts:
        raise ValueError(f"expert_ids name {call.expert_ids.shape[1]} experts per token, but the layer has {experts}")
    last_row = call.first_row + 2 * experts
    if call.first_row < 0 or last_row > len(call.bits):
        raise ValueError(f"rows {call.first_row} to {last_row} are beyond the {len(call.bits)} rows of the tables")
    _check_tensors(device, call.tables, call.stats)
    _check_bias("gate_up_bias", call.gate_up_bias, (experts, (1 + call.gated) * call.intermediate), device)
    _check_bias("down_bias", call.down_bias, (experts, call.x.shape[1]), device)
    _check_room(call.stats, call.layer_index, experts)


def _check_batch(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, token_slot: torch.Tensor
) -> None:
    if x.dim() != 2 or x.dtype not in INPUT_TYPES:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; give (T, H) in fp32, fp16 or bf16")
    if expert_ids.dim() != 2 or len(expert_ids) != len(x) or expert_ids.dtype not in ID_TYPES:
        raise ValueError(f"expert_ids is {expert_ids.dtype} {tuple(expert_ids.shape)}; give int ({len(x)}, A)")
    if expert_weights.shape != expert_ids.shape or expert_weights.dtype not in INPUT_TYPES:
        raise ValueError(
            f"expert_weights is {expert_weights.dtype} {tuple(expert_weights.shape)}; "
            f"give floating point {tuple(expert_ids.shape)}"
        )
    if token_slot.shape != x.shape[:1] or token_slot.dtype != torch.int32 or not token_slot.is_contiguous():
        raise ValueError(f"token_slot is {token_slot.dtype} {tuple(token_slot.shape)}; give int32 ({len(x)},)")


def _check_tensors(device: torch.device, tables: BlockTables, stats: RoutingStats) -> None:
    expected = {"bits": torch.int32, "frame_address": torch.int64, "table_address": torch.int64, "memory": torch.uint8}
    expected |= {"mass": torch.float32, "counts": torch.int32, "features": torch.float32}
    for name, tensor in {**tables._asdict(), **stats._asdict()}.items():
        if tensor.dtype != expected[name] or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}; give a contiguous {expected[name]} tensor")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and x on {device}; keep a layer on one device")


def _check_bias(name: str, bias: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    if bias is None:
        return
    if bias.shape != shape or bias.dtype not in INPUT_TYPES or not bias.is_contiguous():
        raise ValueError(f"{name} is {bias.dtype} {tuple(bias.shape)}; give contiguous floating point {shape} or None")
    if bias.device != device:
        raise ValueError(f"{name} is on {bias.device} and x on {device}; keep a layer on one device")


def _check_room(stats: RoutingStats, layer_index: int, experts: int) -> None:
    _, layers, room = stats.mass.shape
    if room < experts:
        raise ValueError(f"statistics hold {room} experts; the layer has {experts}")
    if not 0 <= layer_index < layers:
        raise ValueError(f"layer_index is {layer_index}; statistics hold {layers} layers")
    if stats.counts.shape != stats.mass.shape or stats.features.shape != (*stats.mass.shape, 2, 3):
        raise ValueError(
            f"counts is {tuple(stats.counts.shape)} and features {tuple(stats.features.shape)}; beside mass of "
            f"{tuple(stats.mass.shape)} they must be of the same shape, and of that shape and (2, 3)"
        )
