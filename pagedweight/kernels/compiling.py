"""Compiles a layer's kernels side by side before they are needed: each takes seconds, and every batch size has some."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton

from pagedweight.kernels.decode.launch import can_decode
from pagedweight.kernels.decode.launches import Call, decode_launches
from pagedweight.kernels.launch import split_codebooks
from pagedweight.kernels.prefill.config import PrefillConfig, can_prefill

# One, a few and many tokens of a decode step, and a prompt's.
BATCHES = (1, 2, 16, 64, 512)
WORKERS = 8


class LayerArguments(NamedTuple):
    """What `fused_moe` takes of a layer, in its order."""

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
    widths: Sequence[int]
    codebooks: str
    gated: bool = True
    limit: float = 0.0
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def compile_kernels(
    layer: LayerArguments, hidden: int, choices: int, dtype: torch.dtype, batches: Sequence[int] = BATCHES
) -> int:
    """Compile what `fused_moe` launches for int64 ids and fp32 weights at each batch size; returns how many launches.

    hidden: H. choices: experts a token. dtype: of x. Layers of one shape share kernels: call it for one of them.
    Nothing runs on the device. The grouped kernels, which serve what neither other path does, are left out.
    """
    with torch.cuda.device(layer.bits.device):
        launches = []
        for tokens in batches:
            x = torch.empty((tokens, hidden), dtype=dtype, device=layer.bits.device)
            if can_decode(x):
                launches += _decode_launches(layer, x, choices)
            elif can_prefill(x):
                launches += _prefill_launches(layer, x, choices)
        with ThreadPoolExecutor(WORKERS) as pool, triton.AsyncCompileMode(pool):
            for launch in launches:
                launch.kernel.warmup(grid=(1,), **launch.arguments)
    return len(launches)


def _decode_launches(layer: LayerArguments, x: torch.Tensor, choices: int) -> list[Any]:
    ids = torch.empty((len(x), choices), dtype=torch.int64, device=x.device)
    slots = torch.empty(len(x), dtype=torch.int32, device=x.device)
    widths = tuple(layer.widths)
    call = Call(
        x, ids, ids.float(), slots, layer.bits, layer.frame_address, layer.table_address, layer.mass, layer.counts,
        layer.features, layer.layer_index, layer.first_row, layer.experts, layer.intermediate, layer.frame_bytes,
        layer.activation, widths, split_codebooks(layer.codebooks, widths), None, None, layer.gated, layer.limit,
        layer.gate_up_bias, layer.down_bias,
    )  # fmt: skip
    return decode_launches(call)[1]


def _prefill_launches(layer: LayerArguments, x: torch.Tensor, choices: int) -> list[Any]:
    # Not at the top: it needs Gluon, which not every Triton has.
    from pagedweight.kernels.prefill import launch
    from pagedweight.kernels.prefill.prepare import Prepared, operand_columns
    from pagedweight.kernels.routing import Grouping

    widths = tuple(layer.widths)
    described = launch.Layer(
        layer.bits, layer.frame_address, layer.table_address, layer.first_row, x.shape[1], layer.intermediate,
        layer.frame_bytes, layer.activation, widths, split_codebooks(layer.codebooks, widths), layer.gated,
        layer.limit, layer.gate_up_bias, layer.down_bias,
    )  # fmt: skip
    grouping = Grouping(*(torch.empty(1, dtype=torch.int32, device=x.device) for _ in Grouping._fields))
    spread, h = (x.new_empty(1, operand_columns(columns)) for columns in (x.shape[1], layer.intermediate))
    prepared = Prepared(grouping, spread, torch.empty(1, device=x.device), h)
    config = PrefillConfig()
    gate_up = launch.gate_up_launch(described, prepared, choices, config)[1]
    return [gate_up, launch.down_launch(described, prepared, config)[1]]
