"""The registered op: the twin on the CPU, arguments that do not fit refused, Triton needed for CUDA alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedweight.kernels import ops
from pagedweight.kernels.call import Call
from pagedweight.kernels.checks import check_arguments
from pagedweight.layout import RoutingStats
from tests.support import assert_close, draw_bits, draw_routing, draw_tokens, make_layer, zero_slots

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def call(tokens=5, experts=4, hidden=40, intermediate=24):
    layer = make_layer(experts, hidden, intermediate)
    tables = layer.place(draw_bits(layer), device=CPU)
    ids, weights = draw_routing(tokens, experts, 2)
    stats = RoutingStats.zeros(1, 1, experts)
    batch = {
        "x": draw_tokens(tokens, hidden),
        "expert_ids": ids,
        "expert_weights": weights,
        "token_slot": zero_slots(tokens),
    }
    return layer, {**batch, **layer.arguments(tables, stats)}


def test_the_op_on_the_cpu_is_the_twin():
    layer, arguments = call()
    out = torch.ops.pagedweight.fused_moe(**arguments)
    expected = layer.moe(arguments["x"], arguments["expert_ids"], arguments["expert_weights"], draw_bits(layer))
    assert_close(out, expected.float())
    assert arguments["counts"].sum() == 10


@pytest.mark.parametrize("tokens", [0, 5])
def test_opcheck(tokens):
    _, arguments = call(tokens)
    # opcheck clones its inputs, which absolute addresses do not survive: no id, so nothing is read through them.
    arguments["expert_ids"].fill_(-1)
    torch.library.opcheck(torch.ops.pagedweight.fused_moe.default, (), arguments)


def test_case_95_registering_twice_is_harmless():
    _, arguments = call()
    expected = ops.fused_moe(**arguments)
    importlib.reload(ops)
    assert torch.equal(ops.fused_moe(**arguments), expected)
    assert torch.equal(torch.ops.pagedweight.fused_moe(**arguments), expected)


def test_nothing_of_torchs_custom_ops_stands_between_a_call_and_its_kernel():
    """They look at every argument for every argument, ten times the host's time of the call itself."""
    _, arguments = call(0)
    passed = set()
    with torch.no_grad():
        sys.setprofile(lambda frame, *_: passed.add(Path(frame.f_code.co_filename).name))
        try:
            ops.fused_moe(**arguments)
        finally:
            sys.setprofile(None)
    assert "checks.py" in passed
    assert not {"custom_ops.py", "autograd.py"} & passed


@pytest.mark.parametrize("name", ["x", "expert_weights", "gate_up_bias", "down_bias"])
def test_an_input_that_asks_for_gradients_passes_and_gets_none(name):
    _, arguments = call()
    arguments |= {"gate_up_bias": torch.ones(4, 48), "down_bias": torch.ones(4, 40)}
    expected = ops.fused_moe(**arguments)
    arguments[name].requires_grad_()
    out = ops.fused_moe(**arguments)
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="unpatch the model to train it"):
        out.sum().backward()


def test_the_op_itself_refuses_an_input_that_asks_for_gradients():
    _, arguments = call()
    arguments["x"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"has no gradient.* call it under torch.no_grad\(\)"):
        torch.ops.pagedweight.fused_moe(**arguments)
    with torch.no_grad():
        torch.ops.pagedweight.fused_moe(**arguments)


@pytest.mark.parametrize("name", ["x", "expert_weights", "gate_up_bias", "down_bias"])
def test_a_compiled_function_that_asks_for_gradients_is_one_graph(name):
    _, arguments = call()
    arguments |= {"gate_up_bias": torch.ones(4, 48), "down_bias": torch.ones(4, 40)}
    asking = arguments[name].requires_grad_()
    compiled = torch.compile(
        lambda asking: ops.fused_moe(**arguments | {name: 2 * asking}), fullgraph=True, backend="aot_eager"
    )
    out = compiled(asking)
    assert arguments["counts"].sum() == 10
    assert torch.equal(out, ops.fused_moe(**arguments | {name: 2 * asking}))
    with pytest.raises(RuntimeError, match="unpatch the model to train it"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("x", torch.zeros(5, 40, dtype=torch.int32), "x is torch.int32"),
        ("x", torch.zeros(40), "give \\(T, H\\)"),
        ("expert_ids", torch.zeros(5, 2), "expert_ids is torch.float32"),
        ("expert_ids", torch.zeros(4, 2, dtype=torch.int64), "expert_ids"),
        ("expert_weights", torch.zeros(5, 3), "expert_weights"),
        ("token_slot", torch.zeros(5, dtype=torch.int64), "token_slot"),
        ("bits", torch.zeros(8), "bits is torch.float32"),
        ("first_row", 4, "beyond the 8 rows"),
        ("first_row", -1, "beyond the 8 rows"),
        ("layer_index", 1, "layer_index is 1; statistics hold 1 layers"),
        ("layer_index", -1, "layer_index is -1"),
        ("experts", 1, "2 experts per token"),  # case 8
        ("mass", torch.zeros(1, 1, 3), "hold 3 experts"),
        ("counts", torch.zeros(1, 1, 8, dtype=torch.int32)[..., ::2], "contiguous"),
        ("counts", torch.zeros(1, 1, 3, dtype=torch.int32), "of the same shape"),
        ("features", torch.zeros(1, 1, 4, 2), "of the same shape"),
        ("activation", "relu", "activation is 'relu'"),
        ("limit", 7.0, "'silu' with limit 7.0"),
        ("activation", "gpt_oss", "'gpt_oss' with limit 0.0"),
        ("gate_up_bias", torch.zeros(4, 24), r"gate_up_bias is torch.float32 \(4, 24\); .* \(4, 48\)"),
        ("gate_up_bias", torch.zeros(4, 48, dtype=torch.int32), "gate_up_bias is torch.int32"),
        ("gate_up_bias", torch.zeros(4, 96)[:, ::2], "give contiguous"),
        ("down_bias", torch.zeros(3, 40), "down_bias"),
        ("codebooks", "lut16,lut16", "give one for each width"),
        ("codebooks", "lut16,lut16,lut16,lut8,lut16", "lut8 at 5 bits"),
        ("codebooks", "cubic,lut16,lut16,lut16,lut16", "cubic at 2 bits"),
        ("codebooks", "lut4,lut16,lut16,lut16,lut16", "codebook of 2 bits is 'lut4'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name, value, says):
    _, arguments = call()
    with pytest.raises(ValueError, match=says):
        ops.fused_moe(**{**arguments, name: value})


def test_a_gate_with_a_limit_needs_a_gate():
    _, arguments = call()
    with pytest.raises(ValueError, match="'gpt_oss' needs a gate"):
        ops.fused_moe(**arguments | {"activation": "gpt_oss", "limit": 7.0, "gated": False})


def test_tensors_on_another_device_are_refused():
    _, arguments = call()
    arguments |= RoutingStats.zeros(1, 1, 4, "meta")._asdict()
    with pytest.raises(ValueError, match="mass is on meta and x on cpu"):
        check_arguments(Call(**arguments))
    _, arguments = call()
    with pytest.raises(ValueError, match="down_bias is on meta and x on cpu"):
        check_arguments(Call(**arguments | {"down_bias": torch.zeros(4, 40, device="meta")}))


_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from tests.kernels.test_ops import call
_, arguments = call()
assert torch.ops.pagedweight.fused_moe(**arguments).isfinite().all()
from pagedweight.kernels.call import Call
from pagedweight.kernels.ops import launch_on_cuda
try:
    launch_on_cuda(Call(**arguments))
except ImportError as error:
    print(error)
"""


def test_case_118_without_triton_only_the_cuda_launch_fails():
    run = subprocess.run([sys.executable, "-c", _WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "triton" in run.stdout


_PLAIN_CPU = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import torch
from tests.kernels.test_ops import call
layer, arguments = call()
out = torch.ops.pagedweight.fused_moe(**arguments)
print(float(out.double().sum()))
"""


def test_case_119_cpu_tensors_need_no_interpreter():
    run = subprocess.run([sys.executable, "-c", _PLAIN_CPU], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    _, arguments = call()
    assert float(run.stdout) == pytest.approx(float(ops.fused_moe(**arguments).double().sum()), rel=1e-5)
