"""The grouped kernels against the twin: any routing, widths and shapes, among garbage, on views and in long batches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.kernels.call import Call
from pagedweight.kernels.fused_moe import launch_fused_moe
from pagedweight.kernels.launch import LaunchConfig, choose
from pagedweight.kernels.ops import fused_moe
from pagedweight.kernels.weighted_sum import launch_weighted_sum
from pagedweight.layout import ACTIVATIONS, CODEBOOKS, LIMITED, UNGATED, RoutingStats
from tests.support import (
    DEVICE,
    assert_close,
    draw_bits,
    draw_routing,
    draw_tokens,
    make_layer,
    one_tile,
    run_kernel,
    run_twin,
    zero_slots,
)

ROOT = Path(__file__).parents[2]


@st.composite
def layers(draw, least_experts=1):
    widths = draw(st.sampled_from([(2, 3, 4, 5, 6), (3,), (2, 8), tuple(range(2, 9))]))
    return make_layer(
        draw(st.integers(least_experts, 5)),
        draw(st.sampled_from([33, 44, 64, 100])),
        draw(st.sampled_from([22, 40, 64])),
        widths,
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        seed=draw(st.integers(0, 99)),
        first_row=draw(st.sampled_from([0, 4])),
    )


@st.composite
def mappings(draw, widths):
    """A codebook for every width, any that serves it."""
    return {
        b: draw(
            st.sampled_from([book for book in CODEBOOKS if (book != "lut8" or b <= 4) and (book != "cubic" or b > 2)])
        )
        for b in widths
    }


GATES = [(activation, True, 0.0) for activation in ACTIVATIONS if activation not in LIMITED]
GATES += [(activation, True, limit) for activation in LIMITED for limit in (0.5, 7.0)]
GATES += [(activation, False, 0.0) for activation in UNGATED]


def same(left, right):
    return torch.equal(left.out, right.out) and all(map(torch.equal, left.stats, right.stats))


@given(layers(), st.data())
def test_kernel_equals_twin(layer, data):
    experts = layer.shape.experts
    tokens, per_token = data.draw(st.integers(1, 20)), data.draw(st.integers(1, min(3, experts)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    # Any ids at all: duplicates, and some outside [0, E).
    ids = torch.randint(-1, experts + 1, (tokens, per_token), generator=generator)
    ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    weights = torch.rand(tokens, per_token, generator=generator).to(data.draw(st.sampled_from([torch.float32, dtype])))
    slot = torch.randint(-1, 2, (tokens,), generator=generator, dtype=torch.int32)
    x = draw_tokens(tokens, layer.shape.hidden, tokens, dtype)
    tables = layer.place(draw_bits(layer, tokens))
    kernel = run_kernel(layer, tables, x, ids, weights, slot, slots=2)
    twin = run_twin(layer, tables, x, ids, weights, slot, slots=2)
    assert kernel.out.dtype == dtype
    assert_close(kernel.out, twin.out)
    assert torch.equal(kernel.stats.counts, twin.stats.counts)
    torch.testing.assert_close(kernel.stats.mass, twin.stats.mass)
    assert_close(kernel.stats.features, twin.stats.features, dtype)


def test_an_id_that_is_an_experts_only_in_32_bits_is_none():
    y, out = torch.randn(2, 20, device=DEVICE), torch.empty(1, 20, device=DEVICE)
    y[1] = torch.nan  # nobody has written it
    ids = torch.tensor([[0, 2**32 + 1]], device=DEVICE)
    launch_weighted_sum(y, ids, torch.ones(1, 2, device=DEVICE), out, experts=4)
    torch.testing.assert_close(out, y[:1])


@given(st.data())
def test_kernel_twin_and_definition_agree_under_any_codebooks(data):
    widths = tuple(range(2, 9))
    layer = make_layer(
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from([33, 64, 100])),
        data.draw(st.sampled_from([22, 40])),
        widths,
        seed=data.draw(st.integers(0, 99)),
        codebooks=data.draw(mappings(widths)),
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    bits = draw_bits(layer, data.draw(st.integers(0, 99)))
    ids, weights = draw_routing(6, layer.shape.experts, 1)
    x = draw_tokens(6, layer.shape.hidden, 1, dtype)
    tables = layer.place(bits, padding=1)
    twin = run_twin(layer, tables, x, ids, weights)
    assert_close(twin.out, layer.moe(x, ids, weights, bits), dtype)
    kernel = run_kernel(layer, tables, x, ids, weights)
    assert_close(kernel.out, twin.out)
    assert_close(kernel.stats.features, twin.stats.features, dtype)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate[0]}-{'gated' if gate[1] else 'alone'}-{gate[2]}")
@settings(max_examples=3)
@given(st.data())
def test_kernel_twin_and_definition_agree_for_every_gate(gate, data):
    activation, gated, limit = gate
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    layer = make_layer(
        3,
        data.draw(st.sampled_from([33, 64])),
        data.draw(st.sampled_from([22, 40, 64])),
        activation=activation,
        gated=gated,
        limit=limit,
        biases=data.draw(st.sampled_from([False, True, torch.float16, torch.bfloat16])),
        seed=data.draw(st.integers(0, 99)),
        first_row=data.draw(st.sampled_from([0, 4])),
    )
    bits = draw_bits(layer, data.draw(st.integers(0, 99)))
    ids, weights = draw_routing(6, 3, 2)
    # Four times the usual size, so that a limit of 7 is reached.
    x = 4 * draw_tokens(6, layer.shape.hidden, 1, dtype)
    tables = layer.place(bits, padding=1)
    twin = run_twin(layer, tables, x, ids, weights)
    assert_close(twin.out, layer.moe(x, ids, weights, bits), dtype)
    kernel = run_kernel(layer, tables, x, ids, weights)
    assert_close(kernel.out, twin.out)
    assert_close(kernel.stats.features, twin.stats.features, dtype)


@pytest.mark.parametrize("name", ["gate_up_bias", "down_bias"])
def test_one_bias_may_stand_alone_and_belongs_to_its_own_expert(name):
    layer = make_layer(4, 40, 24, biases=True, first_row=4)
    alone = layer._replace(biases={name: layer.biases[name]})
    bits = draw_bits(layer)
    ids, weights = draw_routing(9, 4, 2)
    x = draw_tokens(9, 40)
    expected = alone.moe(x, ids, weights, bits).float()
    assert_close(run_twin(alone, layer.place(bits), x, ids, weights).out, expected)
    assert_close(run_kernel(alone, layer.place(bits), x, ids, weights).out, expected)


@pytest.mark.parametrize("gate", GATES[::2], ids=lambda gate: gate[0])
def test_a_token_that_is_no_number_is_seen_behind_every_gate(gate):
    activation, gated, limit = gate
    layer = make_layer(2, 33, 22, activation=activation, gated=gated, limit=limit)
    ids, weights = draw_routing(3, 2, 1)
    x = draw_tokens(3, 33)
    x[1] = float("nan")
    for run in (run_kernel, run_twin):
        out = run(layer, layer.place(draw_bits(layer)), x, ids, weights).out
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()


@settings(max_examples=4)
@given(layers(least_experts=2), st.integers(0, 99))
def test_frames_may_lie_anywhere_among_garbage(layer, seed):
    bits = draw_bits(layer, seed)
    ids, weights = draw_routing(5, layer.shape.experts, 2, seed)
    x = draw_tokens(5, layer.shape.hidden, seed)
    here = layer.place(bits, seed, garbage=0x00)
    there = layer.place(bits, seed + 1, garbage=0xFF, spare_frames=7)
    assert same(run_kernel(layer, here, x, ids, weights), run_kernel(layer, there, x, ids, weights))
    assert same(run_twin(layer, here, x, ids, weights), run_twin(layer, there, x, ids, weights))


@pytest.mark.parametrize("width", range(3, 9))
def test_case_1_every_width_with_columns_that_fill_no_word(width):
    layer = make_layer(4, 60, 44, tuple(range(2, 9)))
    bits = torch.full((8,), width, dtype=torch.int32)
    ids, weights = draw_routing(5, 4, 2)
    x = draw_tokens(5, 60)
    assert_close(run_kernel(layer, layer.place(bits), x, ids, weights).out, layer.moe(x, ids, weights, bits).float())


@pytest.mark.parametrize(("hidden", "intermediate"), [(72, 72), (88, 22)])
def test_case_6_padding_bits_and_padding_rows_change_nothing(hidden, intermediate):
    layer = make_layer(3, hidden, intermediate)
    bits = draw_bits(layer)
    ids, weights = draw_routing(6, 3, 2)
    x = draw_tokens(6, hidden)
    for run in (run_kernel, run_twin):
        zeros = run(layer, layer.place(bits, padding=0), x, ids, weights)
        ones = run(layer, layer.place(bits, padding=1), x, ids, weights)
        assert same(zeros, ones)


@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_case_7_neighbours_of_a_view_are_not_read(tokens):
    layer = make_layer(3, 44, 40)
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(tokens, 3, 2)
    guarded = torch.full((tokens, 64), float("nan"))
    guarded[:, :44] = draw_tokens(tokens, 44)
    kernel = run_kernel(layer, tables, guarded[:, :44], ids, weights)
    assert_close(kernel.out, run_twin(layer, tables, guarded[:, :44].clone(), ids, weights).out)
    assert guarded[:, 44:].isnan().all()


@pytest.mark.parametrize(("experts", "per_token"), [(e, a) for e in (1, 3, 5, 48, 60) for a in (1, 3, 4) if a <= e])
def test_case_8_any_number_of_experts(experts, per_token):
    layer = make_layer(experts, 32, 16, (2, 3))
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(2, experts, per_token)
    x = draw_tokens(2, 32)
    assert_close(run_kernel(layer, tables, x, ids, weights).out, run_twin(layer, tables, x, ids, weights).out)


@pytest.mark.parametrize("run", [run_kernel, run_twin])
def test_statistics_may_hold_more_experts_than_the_layer(run):
    layer = make_layer(3, 64, 32, (2, 3))
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(6, 3, 2)
    ids[0, 0], ids[1, 1] = 4, 3  # experts that only another layer of the model has
    x = draw_tokens(6, 64)
    exact, roomy = run(layer, tables, x, ids, weights), run(layer, tables, x, ids, weights, spare_experts=2)
    assert torch.equal(roomy.out, exact.out)
    for here, there in zip(roomy.stats, exact.stats, strict=True):
        assert torch.equal(here[:, :, :3], there)
        assert not here[:, :, 3:].any()


def test_case_10_expert_ids_above_255():
    layer = make_layer(300, 32, 32, (2,))
    ids = 256 + draw_routing(2, 44, 10)[0]
    weights = torch.rand(2, 10)
    x = draw_tokens(2, 32)
    kernel = run_kernel(layer, layer.place(draw_bits(layer)), x, ids, weights)
    assert_close(kernel.out, layer.moe(x, ids, weights, draw_bits(layer)).float())
    assert kernel.stats.counts[0, 1, :256].sum() == 0
    assert kernel.stats.counts.sum() == 20


def test_case_11_a_tokens_answer_does_not_depend_on_the_batch():
    layer = make_layer(3, 40, 24)
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(65, 3, 2)
    x = draw_tokens(65, 40)
    alone = torch.cat(
        [run_twin(layer, tables, x[t : t + 1], ids[t : t + 1], weights[t : t + 1]).out for t in range(65)]
    )
    for tokens in (1, 7, 8, 9, 17, 65):
        kernel = run_kernel(layer, tables, x[:tokens], ids[:tokens], weights[:tokens])
        assert_close(kernel.out, alone[:tokens])


def test_case_25_a_width_touches_only_its_own_experts_tokens():
    layer = make_layer(5, 48, 32, tuple(range(2, 9)))
    bits = draw_bits(layer)
    ids, weights = draw_routing(12, 5, 2)
    x = draw_tokens(12, 48)
    before = run_kernel(layer, layer.place(bits), x, ids, weights).out
    bits[8] = 2 if bits[8] != 2 else 3
    after = run_kernel(layer, layer.place(bits, seed=5), x, ids, weights).out
    routed = (ids == 4).any(1)
    assert routed.any()
    assert torch.equal((before != after).any(1), routed)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", ["weights", "inputs"])
def test_cases_38_and_40_bad_rows_stay_their_own(kind):
    layer = make_layer(4, 40, 24)
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(8, 4, 2)
    x = draw_tokens(8, 40)
    clean = run_kernel(layer, tables, x, ids, weights)
    if kind == "weights":
        weights[5:] = float("nan")
    else:
        x[5], x[6:] = float("nan"), float("inf")
    spoiled = run_kernel(layer, tables, x, ids, weights)
    assert torch.equal(spoiled.out[:5], clean.out[:5])
    assert not spoiled.out[5:].isfinite().any()
    assert all(tensor.isfinite().all() for tensor in spoiled.stats)


def test_case_43_nothing_relies_on_what_fresh_memory_holds(monkeypatch):
    layer = make_layer(4, 40, 22)
    tables = layer.place(draw_bits(layer))
    x = draw_tokens(5, 40)
    ids, weights = torch.full((5, 2), 2), torch.rand(5, 2)
    ids[1, 0] = -1
    expected = run_twin(layer, tables, x, ids, weights)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)
        poison = lambda *a, make=make, **k: _poisoned(make(*a, **k))  # noqa: E731
        monkeypatch.setattr(owner, name, poison)
    kernel = run_kernel(layer, tables, x, ids, weights)
    assert_close(kernel.out, expected.out)
    assert_close(kernel.stats.features, expected.stats.features)


def _poisoned(tensor):
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def test_case_44_no_tokens():
    layer = make_layer(3, 64, 32)
    tables = layer.place(draw_bits(layer))
    for run in (run_kernel, run_twin):
        nothing = run(layer, tables, torch.empty(0, 64).half(), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
        assert nothing.out.shape == (0, 64)
        assert nothing.out.dtype == torch.float16
        assert all(not tensor.any() for tensor in nothing.stats)


def test_case_45_one_expert_takes_all():
    layer = make_layer(8, 32, 16)
    tables = layer.place(draw_bits(layer))
    x, ids, weights = draw_tokens(280, 32), torch.full((280, 1), 2), torch.full((280, 1), 0.5)
    kernel = run_kernel(layer, tables, x, ids, weights)
    assert_close(kernel.out, run_twin(layer, tables, x, ids, weights).out)
    mass = kernel.stats.mass[0, 1]
    assert (mass / mass.sum()).tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_case_49_bf16_is_right_in_the_interpreter_too():
    layer = make_layer(2, 64, 32)
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(4, 2, 1, dtype=torch.bfloat16)
    x = draw_tokens(4, 64, dtype=torch.bfloat16)
    kernel = run_kernel(layer, tables, x, ids, weights)
    assert kernel.out.dtype == torch.bfloat16
    assert_close(kernel.out, layer.moe(x, ids, weights, draw_bits(layer)), torch.bfloat16)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16])
def test_case_51_strided_ids_and_weights(id_type, weight_type):
    layer = make_layer(3, 40, 24, (2, 4))
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(4, 3, 2)
    x = draw_tokens(4, 40)
    gaps = torch.full((4, 4), 10**6, dtype=id_type)
    gaps[:, ::2] = ids.to(id_type)
    columns = torch.full((3, 4), float("nan"), dtype=weight_type)
    columns[:2] = weights.T
    strided = run_kernel(layer, tables, x, gaps[:, ::2], columns.T[:, :2])
    plain = run_kernel(layer, tables, x, gaps[:, ::2].contiguous(), columns.T[:, :2].contiguous())
    assert same(strided, plain)


def test_case_53_small_and_large_tiles_agree():
    layer = make_layer(2, 100, 70)
    tables = layer.place(draw_bits(layer))
    switch = next(t for t in range(1, 99) if choose(2, t, 2, 1 << 20) != choose(2, t + 1, 2, 1 << 20))
    ids, weights = draw_routing(switch + 1, 2, 1)
    x = draw_tokens(switch + 1, 100)
    few = run_kernel(layer, tables, x[:-1], ids[:-1], weights[:-1], config=choose(2, switch, 2, 1 << 20))
    many = run_kernel(layer, tables, x, ids, weights, config=choose(2, switch + 1, 2, 1 << 20))
    assert_close(many.out[:-1], few.out)


_LONG_STRIDES = """
import torch
from tests.support import *
layer = make_layer(2, 64, 32, (2,))
ids, weights = draw_routing(3, 2, 1)
x = torch.as_strided(torch.empty(2**31 + 4096, dtype=torch.float16), (3, 64), (2**30, 1))
x.copy_(draw_tokens(3, 64))
tables = layer.place(draw_bits(layer))
assert_close(run_kernel(layer, tables, x, ids, weights).out, run_twin(layer, tables, x.clone(), ids, weights).out)
"""


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter shows the overflow without 4 GiB of device memory")
def test_case_62_offsets_beyond_32_bits():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _LONG_STRIDES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_long_batches_run_in_parts(monkeypatch):
    layer = make_layer(3, 40, 24)
    tables = layer.place(draw_bits(layer))
    ids, weights = draw_routing(7, 3, 2)
    x = draw_tokens(7, 40)
    whole = run_kernel(layer, tables, x, ids, weights)
    monkeypatch.setattr("pagedweight.kernels.fused_moe.PAIRS_PER_LAUNCH", 6)
    parts = run_kernel(layer, tables, x, ids, weights)
    assert_close(parts.out, whole.out)
    assert torch.equal(parts.stats.counts, whole.stats.counts)


def test_several_tiles_in_every_direction():
    layer = make_layer(2, 70, 40)
    tables = layer.place(draw_bits(layer), padding=1)
    ids, weights = draw_routing(20, 2, 2)
    x = draw_tokens(20, 70)
    small = run_kernel(layer, tables, x, ids, weights, config=LaunchConfig(block_m=16, block_n=32, words=1))
    assert_close(small.out, run_twin(layer, tables, x, ids, weights).out)
    assert_close(small.stats.features, run_twin(layer, tables, x, ids, weights).stats.features)


def _gpu_call(layer, tables, tokens, per_token, dtype=torch.bfloat16, seed=0):
    ids, weights = draw_routing(tokens, layer.shape.experts, per_token, seed)
    stats = RoutingStats.zeros(1, 1, layer.shape.experts, DEVICE)
    batch = (draw_tokens(tokens, layer.shape.hidden, seed, dtype), ids, weights, zero_slots(tokens))
    return Call(*(tensor.to(DEVICE) for tensor in batch), **layer.arguments(tables, stats))


@pytest.mark.gpu
def test_case_54_equal_runs_give_equal_bits():
    layer = make_layer(8, 512, 352)
    call = _gpu_call(layer, layer.place(draw_bits(layer)), 1, 4)
    first = launch_fused_moe(call)
    assert all(torch.equal(launch_fused_moe(call), first) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 33, 129])
def test_case_55_a_token_alone_and_in_company(tokens):
    layer = make_layer(8, 512, 352)
    call = _gpu_call(layer, layer.place(draw_bits(layer)), tokens, 4)
    alone = launch_fused_moe(call.tokens(slice(0, 1)))
    assert_close(launch_fused_moe(call)[:1], alone)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "per_token", "hidden", "intermediate"),
    [
        (70_000, 2, 32, 32),  # case 64: more tokens than a grid dimension may have
        (275_000, 4, 32, 1024),  # case 62: 1.1 million pairs of 2 I = 2048
    ],
)
def test_cases_62_and_64_very_long_batches(tokens, per_token, hidden, intermediate):
    layer = make_layer(5, hidden, intermediate, (2, 3))
    call = _gpu_call(layer, layer.place(draw_bits(layer)), tokens, per_token)
    out = launch_fused_moe(call)
    for rows in (slice(0, 64), slice(tokens - 64, tokens)):
        assert_close(out[rows], launch_fused_moe(call.tokens(rows)))


@pytest.mark.gpu
def test_cases_65_and_68_a_captured_graph_follows_the_tables_without_a_sync():
    layer = make_layer(4, 256, 192)
    bits = torch.full((8,), 6, dtype=torch.int32)
    tables = layer.place(bits, spare_frames=64)
    call = _gpu_call(layer, tables, 16, 2)
    launch_fused_moe(call)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = launch_fused_moe(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bits[:2] = 3
    lowered = layer.place(bits, seed=1, spare_frames=64)
    moved = lowered.memory.data_ptr() - tables.memory.data_ptr()
    size = min(len(lowered.memory), len(tables.memory))
    tables.memory.fill_(0xFF)
    tables.memory[:size].copy_(lowered.memory[:size])
    tables.bits.copy_(lowered.bits)
    tables.frame_address.copy_(lowered.frame_address - moved)
    tables.table_address.copy_(lowered.table_address - moved)
    graph.replay()
    assert torch.equal(out, launch_fused_moe(call))
    dense = layer.moe(*(tensor.cpu() for tensor in call[:3]), bits)
    assert_close(out.cpu(), dense, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate[0]}-{'gated' if gate[1] else 'alone'}-{gate[2]}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_gate_through_the_op_eager_and_captured(gate, dtype):
    activation, gated, limit = gate
    layer = make_layer(5, 256, 192, activation=activation, gated=gated, limit=limit, biases=dtype)
    bits = draw_bits(layer)
    call = _gpu_call(layer, layer.place(bits), 7, 2, dtype)
    call.x.mul_(4)
    expected = layer.moe(*(tensor.cpu() for tensor in call[:3]), bits)
    assert_close(fused_moe(*call).cpu(), expected, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_moe(*call)
    graph.replay()
    assert_close(out.cpu(), expected, dtype)


@pytest.mark.gpu
def test_case_116_first_launches_from_four_threads():
    layers_ = [make_layer(3, hidden, 96) for hidden in (160, 224)]
    calls = [_gpu_call(layer, layer.place(draw_bits(layer)), 5, 2) for layer in layers_]
    results, threads = {}, []

    def work(index):
        results[index] = launch_fused_moe(calls[index % 2])

    for index in range(4):
        threads.append(threading.Thread(target=work, args=(index,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_case_97_a_layer_on_another_device_than_the_current_one():
    layer = make_layer(3, 64, 32)
    other = torch.device("cuda", 1)
    tables = layer.place(draw_bits(layer), device=other)
    ids, weights = draw_routing(5, 3, 2)
    x = draw_tokens(5, 64)
    assert torch.cuda.current_device() == 0
    stats = RoutingStats.zeros(1, 1, 3, other)
    batch = (tensor.to(other) for tensor in (x, ids, weights, zero_slots(5)))
    out = fused_moe(*batch, **layer.arguments(tables, stats))
    assert_close(out.cpu(), layer.moe(x, ids, weights, draw_bits(layer)).float())


def test_tiles_for_the_interpreter_are_whole_layers():
    layer = make_layer(1, 64, 44)
    assert one_tile(layer) == LaunchConfig(block_n=128, words=2)
