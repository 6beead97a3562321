"""A patched model compiled into one graph: no break, no second compilation when widths and pages change."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from tests.hf_models import DenseReference, quantized_folder, tokens
from tests.support import assert_close

BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def patched(**config) -> PreTrainedModel:
    model = pagedweight.load(quantized_folder("M8"), config=RuntimeConfig(**config))
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_generate_with_a_static_cache_is_one_graph_at_any_widths(backend: str) -> None:
    model, reference = patched(), DenseReference("M8")
    one_graph = CompileConfig(backend=backend, fullgraph=True, mode=None, dynamic=False)
    one_graph._compile_all_devices = True
    ids = tokens(2, 5)
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    compiled = None
    for bits in (6, 2, 4):
        with model.pagedweight.held_at(bits):
            got = model.generate(ids, compile_config=one_graph, **settings)
        wanted = reference.set_bits(bits).generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(got, wanted)
        compiled = compiled or graphs()
        assert graphs() == compiled > 0
    assert int(model.pagedweight.stats.counts.sum()) == 2 * 2 * 2 * (
        5 + 5
    )  # layers, choices, sequences, tokens of the last run


@torch.no_grad()
def test_a_forward_in_one_graph_after_its_boundary() -> None:
    model, reference = patched(budget_bytes=1 << 22), DenseReference("M8")
    forward = torch.compile(model, backend="eager", fullgraph=True)
    ids = tokens(2, 5)
    for bits in (6, 3, 5):
        model.pagedweight.set_bits(bits)
        model.pagedweight.before_forward(input_ids=ids)
        logits = forward(input_ids=ids, use_cache=False).logits
        at = model.pagedweight.snapshot().bits
        assert_close(logits, reference.set_bits(at)(ids).logits)
        assert graphs() == 1


@torch.no_grad()
def test_one_graph_without_a_boundary_says_what_to_do() -> None:
    forward = torch.compile(patched(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"before_forward\(\.\.\.\)"):
        forward(input_ids=tokens(2, 5), use_cache=False)


@torch.no_grad()
def test_an_exported_forward_has_no_boundary() -> None:
    model = patched()
    before = model.pagedweight.snapshot().step
    torch.export.export(model, (), {"input_ids": tokens(2, 5), "use_cache": False}, strict=False)
    assert model.pagedweight.snapshot().step == before


@torch.no_grad()
def test_generate_calls_one_boundary_before_each_forward() -> None:
    model = patched()
    before = model.pagedweight.snapshot().step
    model.generate(tokens(2, 5), max_new_tokens=6, do_sample=False)
    assert model.pagedweight.snapshot().step == before + 6
    model(tokens(2, 5))
    assert model.pagedweight.snapshot().step == before + 7
