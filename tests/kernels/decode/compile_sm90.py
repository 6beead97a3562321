"""Compiles the chosen decode launches for sm_90 without a GPU; prints what the compiler made of them as JSON.

Run as a script: where tests interpret kernels, the same process cannot compile them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.config import Hardware, Workload, choose
from pagedweight.kernels.decode.launches import Launch, decode_launches
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry

H200 = Hardware(232448, True)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8"}
OPTIONS = ("num_warps", "maxnreg", "launch_pdl")


def launches(tokens: int, widths: tuple[int, ...], codebooks: tuple[str, ...]) -> list[Launch]:
    """Those of a Qwen1.5-MoE layer, over tensors without memory."""
    work = Workload(tokens, 4, 60, 2048, 1408, widths, codebooks)
    matrices = [(2816, 2048), (2048, 1408)]
    frame_bytes = choose_frame_bytes(matrices)
    frames = max(plane_geometry(*matrix, frame_bytes).frames for matrix in matrices)

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    arguments = (
        empty(tokens, 2048, dtype=torch.bfloat16),
        empty(tokens, 4, dtype=torch.int64),
        empty(tokens, 4, dtype=torch.float32),
        empty(tokens, dtype=torch.int32),
        empty(120, dtype=torch.int32),
        empty(120, widths[-1], frames, dtype=torch.int64),
        empty(120, dtype=torch.int64),
        empty(0, dtype=torch.uint8),
        empty(1, 1, 60, dtype=torch.float32),
        empty(1, 1, 60, dtype=torch.int32),
        empty(1, 1, 60, 2, 3, dtype=torch.float32),
    )
    call = Call(*arguments, 0, 0, 60, 1408, frame_bytes, "silu", list(widths), ",".join(codebooks))
    return decode_launches(call, choose(work, H200), use_ptx=True)[1]


def compiled(launch: Launch) -> dict[str, object]:
    names, values = launch.kernel.arg_names, launch.arguments
    scalars = [parameter.name for parameter in launch.kernel.params if parameter.do_not_specialize]
    signature = {
        name: TYPES[values[name].dtype]
        if isinstance(values[name], torch.Tensor)
        else ("i32" if name in scalars else "constexpr")
        for name in names
    }
    constants = {name: values[name] for name in names if signature[name] == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {name: values[name] for name in OPTIONS if name in values}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    loops = _loops(kernel.asm["ttgir"])
    return {
        "kernel": launch.kernel.__name__,
        "product_loops": len(loops),
        "conversions": sum(loop.count("ttg.convert_layout") for loop in loops),
        # An operand that takes the way through shared memory; the pipeline's own buffers have no operand.
        "stored_operands": sum(len(re.findall(r"ttg\.local_alloc %", loop)) for loop in loops),
        "shared_bytes": kernel.metadata.shared,
        "room_bytes": constants["ROOM"],
        "stack_bytes": _stack_bytes(kernel.asm["cubin"]),
    }


def _loops(ttgir: str) -> list[str]:
    """The bodies of the innermost loops that multiply."""
    bodies, lines = [], ttgir.splitlines()
    for start, line in enumerate(lines):
        if "scf.for" in line:
            indent = len(line) - len(line.lstrip())
            end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
            body = "\n".join(lines[start + 1 : end])
            if "tt.dot" in body or "warp_group_dot" in body:
                bodies.append(body)
    return [body for body in bodies if "scf.for" not in body]


def _stack_bytes(cubin: bytes) -> int:
    """Bytes of stack a thread uses: registers that did not fit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


if __name__ == "__main__":
    tokens, widths, codebooks = json.loads(sys.argv[1])
    made = launches(tokens, tuple(widths), tuple(codebooks))
    print(json.dumps([compiled(launch) for launch in made if "CODEBOOKS" in launch.arguments]))
