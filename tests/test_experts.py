"""PagedExperts as a module: the dense layer's answers, no state of its own to move, copy or save; and request slots."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from pagedweight.experts import PagedExperts, TokenSlots
from pagedweight.kernels import ops
from pagedweight.layout import RoutingStats
from tests.support import DEVICE, assert_close, draw_bits, draw_routing, draw_tokens, make_layer


def paged_layer(slots=2, **shape):
    layer = make_layer(**{"experts": 4, "hidden": 64, "intermediate": 40, **shape})
    tables = layer.place(draw_bits(layer))
    stats = RoutingStats.zeros(slots, 3, layer.shape.experts, DEVICE)
    module = PagedExperts(
        layer.shape,
        1,
        layer.first_row,
        tables,
        stats,
        TokenSlots(4, DEVICE),
        frame_bytes=layer.frame_bytes,
        widths=layer.widths,
        codebooks=layer.codebooks,
        biases={name: bias.to(DEVICE) for name, bias in layer.biases.items()},
    )
    return layer, module


def batch(tokens, dtype=torch.float32):
    ids, weights = draw_routing(tokens, 4, 2)
    return draw_tokens(tokens, 64, dtype=dtype).to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


def test_module_is_the_dense_layer():
    layer, module = paged_layer()
    inputs = batch(6)
    expected = layer.moe(*(tensor.cpu() for tensor in inputs), draw_bits(layer)).float()
    assert_close(module(*inputs).cpu(), expected)
    assert_close(torch.compile(module, backend="eager", fullgraph=True)(*inputs).cpu(), expected)
    with torch.inference_mode():
        assert_close(module(*inputs).cpu(), expected)


def test_case_95_a_module_outlives_a_reload_of_the_ops():
    _, module = paged_layer()
    inputs = batch(6)
    expected = module(*inputs)
    importlib.reload(ops)
    assert torch.equal(module(*inputs), expected)


def test_statistics_go_to_each_tokens_slot():
    _, module = paged_layer()
    module.slots.set(torch.tensor([0, 1, 1, -1]))
    module(*batch(6))
    counts = module.stats.counts.sum(-1).tolist()
    # Two experts per token; the fourth token is padding, and so are those beyond the slots given.
    assert counts == [[0, 2, 0], [0, 4, 0]]


def test_case_111_moving_the_model_leaves_planes_alone():
    layer, module = paged_layer()
    model = nn.ModuleList([module])
    memory, addresses = module.tables.memory.clone(), module.tables.frame_address.clone()
    inputs = batch(5)
    expected = layer.moe(*(tensor.cpu() for tensor in inputs), draw_bits(layer))
    for move in (model.half, model.bfloat16, model.float, lambda: model.to(DEVICE)):
        move()
        assert torch.equal(module.tables.memory, memory)
        assert torch.equal(module.tables.frame_address, addresses)
        assert_close(module(*inputs).cpu(), expected.float())
    for dtype in (torch.float16, torch.bfloat16):
        out = module(inputs[0].to(dtype), *inputs[1:])
        assert out.dtype == dtype
        assert_close(out.cpu(), expected, dtype)


def test_nothing_of_the_arena_is_in_the_state_dict():
    _, module = paged_layer()
    assert not module.state_dict()
    assert not list(module.parameters())
    assert not any(buffer.numel() for buffer in module.buffers())


def test_biases_are_parameters_that_follow_the_model():
    layer, module = paged_layer(biases=True)
    assert dict(module.named_parameters()).keys() == module.state_dict().keys() == layer.biases.keys()
    hidden, ids, weights = batch(6)
    expected = layer.moe(hidden.cpu(), ids.cpu(), weights.cpu(), draw_bits(layer)).float()
    assert_close(module(hidden, ids, weights).cpu(), expected)
    module.half()
    assert module.down_bias.dtype == module.dense_dtype == torch.float16
    assert_close(module(hidden, ids, weights).cpu(), expected, torch.float16)


def test_tokens_may_come_in_any_shape():
    _, module = paged_layer()
    hidden, ids, weights = batch(6)
    flat = module(hidden, ids, weights)
    assert torch.equal(module(hidden.view(2, 3, 64), ids, weights), flat.view(2, 3, 64))


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps, copy.copy])
def test_copies_are_refused_in_a_sentence(copier):
    _, module = paged_layer()
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*pagedweight\.save"):
        copier(nn.Sequential(module) if copier is not copy.copy else module)


def test_inputs_of_another_width_are_refused():
    _, module = paged_layer()
    x, ids, weights = batch(3)
    with pytest.raises(ValueError, match=r"this layer takes \(T, 64\)"):
        module(x[:, :32], ids, weights)


def test_slots_are_zero_until_set_and_padding_after():
    slots = TokenSlots(3)
    assert slots.view(3).tolist() == [0, 0, 0]
    assert slots.view(5).tolist() == [0, 0, 0, 0, 0]
    slots.set(torch.tensor([2, -1]))
    assert slots.view(4).tolist() == [2, -1, -1, -1]
    assert slots.view(9).tolist() == [2, -1, -1, -1, -1, -1, -1, -1, -1]
    slots.reset()
    assert slots.view(2).tolist() == [0, 0]


def test_slots_keep_their_address_within_capacity():
    slots = TokenSlots(8)
    address = slots.view(1).data_ptr()
    slots.set(torch.arange(8))
    slots.reset()
    assert slots.view(8).data_ptr() == address


@pytest.mark.parametrize("bad", [torch.zeros(2, 2), torch.zeros(2)])
def test_bad_slots_are_refused(bad):
    with pytest.raises(ValueError, match="one integer per token"):
        TokenSlots().set(bad)
    with pytest.raises(ValueError, match="at least 1"):
        TokenSlots(0)


def test_case_83_slots_born_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        slots = TokenSlots(2)
        slots.view(5)
    slots.set(torch.tensor([1, 1, 1, 1, 1]))
    with torch.inference_mode():
        slots.set(torch.tensor([0, 2]))
    assert slots.view(3).tolist() == [0, 2, -1]
