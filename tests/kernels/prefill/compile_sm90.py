"""Compiles the prefill products for sm_90 without a GPU; prints what the compiler made of them as JSON.

Run as a script: where tests interpret kernels, the same process cannot compile them.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from pagedweight.kernels.call import Call
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry
from pagedweight.kernels.prefill.config import PrefillConfig
from pagedweight.kernels.prefill.launch import ProductLaunch, down_launch, gate_up_launch
from pagedweight.kernels.prefill.prepare import Prepared, operand_columns
from pagedweight.kernels.routing import Grouping
from tests.kernels.decode.compile_sm90 import TYPES, _stack_bytes

HIDDEN, INTERMEDIATE = 2816, 704  # a tail of 8 words, and one of 6


def launches(widths: tuple[int, ...], codebooks: tuple[str, ...], tokens: int) -> list[ProductLaunch]:
    """Those of a Gemma-4 layer, over tensors without memory."""
    matrices = [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    frame_bytes = choose_frame_bytes(matrices)
    frames = max(plane_geometry(*matrix, frame_bytes).frames for matrix in matrices)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = (empty(1, HIDDEN, dtype=torch.bfloat16), empty(1, 8), empty(1, 8), empty(1))
    tables = (empty(256, dtype=torch.int32), empty(256, widths[-1], frames), empty(256), empty(0))
    sizes = (0, 0, 128, INTERMEDIATE, frame_bytes)
    call = Call(*batch, *tables, *(empty(0),) * 3, *sizes, "gelu_tanh", list(widths), ",".join(codebooks))
    grouping = Grouping(*(empty(8, dtype=torch.int32) for _ in range(5)))
    config = PrefillConfig(tokens=tokens)
    inputs = empty(8, operand_columns(HIDDEN), dtype=torch.bfloat16)
    h = empty(8, operand_columns(INTERMEDIATE), dtype=torch.bfloat16)
    totals = empty(8, dtype=torch.float32)
    prepared = Prepared(grouping, inputs, totals, totals, h)
    return [gate_up_launch(call, prepared, config)[-1], down_launch(call, prepared, totals, config)[-1]]


def compiled(launch: ProductLaunch) -> dict[str, object]:
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
    source = GluonASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    kernel = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.arguments["num_warps"]}
    )
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\{|%)", kernel.asm["ptx"])
    return {
        "kernel": launch.kernel.__name__,
        "products": len(products),
        "from_registers": products.count("{"),
        "shared_bytes": kernel.metadata.shared,
        "stack_bytes": _stack_bytes(kernel.asm["cubin"]),
    }


if __name__ == "__main__":
    widths, codebooks, tokens = json.loads(sys.argv[1])
    made = launches(tuple(widths), tuple(codebooks), tokens)
    print(json.dumps([compiled(launch) for launch in made]))
