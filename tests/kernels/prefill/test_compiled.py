import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 * 1024  # what Hopper grants one program


def test_decoded_weights_go_from_registers_to_the_tensor_cores():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.prefill.compile_sm90", json.dumps([[4], ["lut8"], 64])]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    for kernel in json.loads(result.stdout):
        # Four steps of a block and two of the narrow tail, eight products each.
        assert kernel["products"] == kernel["from_registers"] == 48, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        assert kernel["stack_bytes"] == 0, kernel
