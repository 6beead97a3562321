import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from pagedweight.kernels.decode.config import takes_int8
from pagedweight.kernels.decode.room import UNASKED_BYTES

ROOT = Path(__file__).parents[3]
FAST = ("lut8", "lut8", "affine")


@pytest.mark.parametrize(
    ("tokens", "widths", "codebooks"),
    [
        (16, (5, 6), ("lut16", "cubic")),
        (16, (3, 4, 6), FAST),
        (16, (3, 4, 6), ("lut16", "lut16", "lut16")),  # two bytes a weight; one look-up a weight at 6 bits
        (64, (4,), ("lut8",)),  # two products for one decoded tile
    ],
    ids=["16-bit", "int8", "lut16", "int8-eight"],
)
def test_decoded_weights_stay_in_registers(tokens, widths, codebooks):
    if any(map(takes_int8, codebooks, widths)) and not triton.__version__.startswith("3.6."):
        pytest.skip(f"Triton {triton.__version__} moves int8 operands through shared memory; 3.6 does not")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.decode.compile_sm90", json.dumps([tokens, widths, codebooks])]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    for kernel in json.loads(result.stdout):
        assert kernel["product_loops"] == len(widths), kernel
        assert kernel["conversions"] == kernel["stored_operands"] == 0, kernel
        assert kernel["shared_bytes"] <= 99 * 1024, kernel
        assert kernel["stack_bytes"] == 0, kernel
        own, room = kernel["shared_bytes"], kernel["room_bytes"]
        assert own > UNASKED_BYTES or own + room <= UNASKED_BYTES, kernel
