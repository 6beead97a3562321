"""Compile the kernels of a layer for GPUs that are not here, and say what each would take of its shared memory.

    python scripts/other_gpus.py --out bench/results/other-gpus.json
    python scripts/other_gpus.py --out bench/results/other-gpus.json --only Turing

For each GPU: the launches for 1, 16 and 512 tokens, as the regimes and the launchers choose them, for a layer of
Qwen1.5-MoE's shape; of Hopper's prompts the grouped kernels. Turing has no bfloat16 and takes float16. Nothing runs.
With --only, rows of other GPUs stay in the file as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.config import MAX_TOKENS, Hardware, Workload, choose
from pagedweight.kernels.decode.launches import decode_launches
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry
from pagedweight.kernels.fused_moe import launch_fused_moe
from pagedweight.kernels.launch import choose as choose_tiles
from pagedweight.kernels.launch import join_codebooks

EXPERTS, CHOICES, HIDDEN, INTERMEDIATE = 60, 4, 2048, 1408
WIDTHS = (2, 3, 4, 5, 6)
CODEBOOKS = {"16-bit tables": ("lut16",) * 5, "byte tables": ("lut8", "lut8", "lut8", "affine", "affine")}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Device(NamedTuple):
    """shared_bytes: what one program may take. ptx: whether the decode path writes PTX there."""

    name: str
    target: GPUTarget
    shared_bytes: int
    dtype: torch.dtype
    ptx: bool


DEVICES = (
    Device("Turing, 7.5", GPUTarget("cuda", 75, 32), 65536, torch.float16, False),
    Device("Ampere, 8.0", GPUTarget("cuda", 80, 32), 166912, torch.bfloat16, True),
    Device("Ampere, 8.6", GPUTarget("cuda", 86, 32), 101376, torch.bfloat16, True),
    Device("Ada, 8.9", GPUTarget("cuda", 89, 32), 101376, torch.bfloat16, True),
    Device("Hopper, 9.0", GPUTarget("cuda", 90, 32), 232448, torch.bfloat16, True),
    Device("Blackwell, 12.0", GPUTarget("cuda", 120, 32), 101376, torch.bfloat16, True),
    Device("MI200, gfx90a", GPUTarget("hip", "gfx90a", 64), 65536, torch.bfloat16, False),
    Device("MI300, gfx942", GPUTarget("hip", "gfx942", 64), 65536, torch.bfloat16, False),
)


class Launch(NamedTuple):
    kernel: JITFunction
    arguments: dict[str, Any]


def arguments_of(tokens: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Tensors without memory, in the order of both launchers, and the frame's bytes."""
    matrices = [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    frame_bytes = choose_frame_bytes(matrices)
    frames = max(plane_geometry(*matrix, frame_bytes).frames for matrix in matrices)
    rows, ints, floats = 2 * EXPERTS, {"dtype": torch.int64}, {"dtype": torch.float32}
    with torch.device("meta"):
        batch = [torch.empty(tokens, HIDDEN, dtype=dtype), torch.empty(tokens, CHOICES, **ints)]
        batch += [torch.empty(tokens, CHOICES, **floats), torch.empty(tokens, dtype=torch.int32)]
        tables = [torch.empty(rows, dtype=torch.int32), torch.empty(rows, WIDTHS[-1], frames, **ints)]
        tables += [torch.empty(rows, **ints), torch.empty(0, dtype=torch.uint8)]
        stats = [torch.empty(1, 1, EXPERTS, **floats), torch.empty(1, 1, EXPERTS, dtype=torch.int32)]
        stats += [torch.empty(1, 1, EXPERTS, 2, 3, **floats)]
    return batch + tables + stats, frame_bytes


def decode(device: Device, tokens: int, codebooks: tuple[str, ...]) -> Iterator[Launch]:
    tensors, frame_bytes = arguments_of(tokens, device.dtype)
    work = Workload(tokens, CHOICES, EXPERTS, HIDDEN, INTERMEDIATE, WIDTHS, codebooks)
    capability = device.target.arch if device.target.backend == "cuda" else 0
    config = choose(work, Hardware(device.shared_bytes, capability >= 90))
    call = call_of(tensors, frame_bytes, codebooks)
    for launch in decode_launches(call, config, device.ptx)[1]:
        yield Launch(launch.kernel, launch.arguments)


def call_of(tensors: list[torch.Tensor], frame_bytes: int, codebooks: tuple[str, ...]) -> Call:
    return Call(
        *tensors,
        layer_index=0,
        first_row=0,
        experts=EXPERTS,
        intermediate=INTERMEDIATE,
        frame_bytes=frame_bytes,
        activation="silu",
        widths=list(WIDTHS),
        codebooks=join_codebooks(dict(zip(WIDTHS, codebooks, strict=True)), WIDTHS),
    )


def grouped(device: Device, tokens: int, codebooks: tuple[str, ...]) -> Iterator[Launch]:
    """The grouped kernels' launches, caught where Triton would start them."""
    tensors, frame_bytes = arguments_of(tokens, device.dtype)
    caught: list[Launch] = []

    def catch(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        caught.append(Launch(kernel, dict(zip(kernel.arg_names, args, strict=False)) | named))

    pairs = tokens * CHOICES
    config = choose_tiles(EXPERTS, pairs, torch.finfo(device.dtype).bits // 8, device.shared_bytes)
    with patch.object(JITFunction, "run", catch):
        launch_fused_moe(call_of(tensors, frame_bytes, codebooks), config)
    yield from caught


def compiled(launch: Launch, target: GPUTarget) -> tuple[str, int]:
    """The kernel's name and the shared memory it takes."""
    values, signature = launch.arguments, {}
    for parameter in launch.kernel.params:
        value = values.get(parameter.name)
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        elif parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    names = launch.kernel.arg_names
    constants = {name: values.get(name) for name in names if signature[name] == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {name: values[name] for name in OPTIONS if name in values}
    return launch.kernel.__name__, triton.compile(source, target=target, options=options).metadata.shared


def rows_of(device: Device) -> Iterator[dict[str, Any]]:
    for name, codebooks in CODEBOOKS.items():
        for tokens in (1, 16, 512):
            made = decode if device.ptx and tokens <= MAX_TOKENS else grouped
            kernels = dict(compiled(launch, device.target) for launch in made(device, tokens, codebooks))
            fits = max(kernels.values()) <= device.shared_bytes
            yield {"device": device.name, "tables": name, "tokens": tokens, "fits": fits, "shared_bytes": kernels}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The record with these rows; those of GPUs that were not compiled for this time stay."""
    now, names = {row["device"] for row in rows}, [device.name for device in DEVICES]
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    kept = [row for row in earlier["rows"] if row["device"] not in now]
    if kept and earlier["triton"] != triton.__version__:
        raise SystemExit(
            f"{path} has rows of Triton {earlier['triton']}, this is {triton.__version__}: leave --only out"
        )
    every = sorted([*kept, *rows], key=lambda row: names.index(row["device"]))
    granted = {device.name: device.shared_bytes for device in DEVICES}
    record = {"command": "python scripts/other_gpus.py", "triton": triton.__version__, "granted_bytes": granted}
    path.write_text(json.dumps(record | {"rows": every}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="a part of a device's name")
    options = parser.parse_args()
    rows = []
    for device in (device for device in DEVICES if options.only in device.name):
        for row in rows_of(device):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    main()
