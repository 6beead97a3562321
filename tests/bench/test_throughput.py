"""The throughput bench: its check tells right from wrong, and mixed widths hold no more than uniform ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from bench.e2e.captured import WHOLE_CACHE, CapturedDecoding, attend_to_whole_cache
from bench.e2e.compiled import compilation, compile_layers
from bench.e2e.drawn import Drawn, dense_model, draw
from bench.e2e.throughput_check import ERROR_LIMIT, error_of, step_logits, twin_logits
from bench.e2e.throughput_generate import dense_generate_rows, paged_generate_rows
from bench.e2e.throughput_moving import moving_row
from bench.e2e.throughput_pages import PAGES, drawn_of
from bench.e2e.throughput_peers import NO_TIME, register_peers
from bench.e2e.throughput_rows import Setting, without_hooks
from bench.e2e.throughput_widths import held_bytes, mixed_bits
from pagedweight.shared_experts import is_folded

WIDTHS = PAGES["lut16"][0]


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    attend_to_whole_cache()
    made = draw("tiny", 1, WIDTHS, "cpu", 0)
    made.model.set_attn_implementation(WHOLE_CACHE)
    return made


def test_the_step_is_the_dense_models_at_its_own_widths_and_at_no_others(drawn: Drawn) -> None:
    model = without_hooks(drawn, WIDTHS[-1])
    decoding, rng = CapturedDecoding(model, 3, 32), np.random.default_rng(0)
    answers = []
    for _ in range(2):
        with model.pagedweight.held_at(rng.choice(WIDTHS, drawn.store.layout.rows)):
            answers.append((step_logits(decoding), twin_logits(drawn, decoding)))
    (got, wanted), (_, other) = answers
    assert error_of(got, wanted) <= ERROR_LIMIT < error_of(got, other)


def test_compiled_layers_answer_the_same_from_one_graph_and_one_that_takes_their_numbers() -> None:
    attend_to_whole_cache()
    dense = dense_model("tiny", 3, "cpu")
    dense.set_attn_implementation(WHOLE_CACHE)
    model = without_hooks(drawn_of(dense, "fast", shared=True), 4)
    # compile_layers sets it for the process; put back, or the tests after this one would compile under it.
    put_back = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False)
    with put_back, model.pagedweight.held_at(4):
        decoding = CapturedDecoding(model, 2, 32)
        wanted = step_logits(decoding)
        compile_layers(model, "eager")
        got = step_logits(decoding)
    assert compilation() == {"graphs": 2, "graph_breaks": 0}
    assert error_of(got, wanted) <= ERROR_LIMIT
    counted = model.pagedweight.stats.counts.sum((0, 2))
    assert len(set(counted.tolist())) == 1, "each layer counts in its own place"


def test_shared_experts_are_folded_after_the_row_whose_experts_take_no_time() -> None:
    dense = dense_model("tiny", 1, "cpu")
    for weight in dense.model.layers[0].mlp.shared_expert.parameters():
        weight.data.mul_(30)  # so that its part of the answer counts, as at a true shape
    dense.set_experts_implementation(register_peers()[NO_TIME])
    assert is_folded(drawn_of(dense, "fast", shared=True).model)


@pytest.mark.parametrize("width", WIDTHS)
def test_mixed_widths_hold_no_more_bytes_than_the_uniform_one(drawn: Drawn, width: int) -> None:
    bits = mixed_bits(drawn, width)
    if bits is None:
        assert width in (WIDTHS[0], WIDTHS[-1])
        return
    assert held_bytes(drawn, bits) <= held_bytes(drawn, np.full_like(bits, width)) == drawn.resident_bytes()[width]
    assert set(bits) == {width - 1, width, width + 1}


def test_pages_leave_and_come_back_beside_the_steps(drawn: Drawn) -> None:
    model = without_hooks(drawn, WIDTHS[-1])
    row = moving_row(CapturedDecoding(model, 2, 512))
    assert row["growing_steps"] >= 1
    assert row["tokens_per_second"][0] > 0
    model.pagedweight.check()


def test_generate_goes_on_from_a_full_cache_a_forward_a_token(drawn: Drawn) -> None:
    setting = Setting(context_tokens=48, steps=4, rounds=1)
    rows = paged_generate_rows(drawn, WIDTHS[0], [2], setting)
    rows += dense_generate_rows(dense_model("tiny", 1, "cpu"), [2], setting)
    assert [row["cache"] for row in rows] == ["arena", "dynamic", "static"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
