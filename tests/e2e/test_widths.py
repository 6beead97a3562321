"""A patched model answers as the dense model rebuilt from the same codes, at uniform and at mixed widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import PreTrainedModel

import pagedweight
from tests.hf_models import FAMILIES, DenseReference, mixtral_m8, quantized_folder, qwen2_moe_q60, tokens
from tests.support import assert_close

WIDTHS = (2, 3, 4, 5, 6)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def patched(family: str) -> PreTrainedModel:
    return pagedweight.patch(FAMILIES[family](), checkpoint=quantized_folder(family))


@pytest.fixture(scope="module")
def reference(family: str) -> DenseReference:
    return DenseReference(family)


def padded(batch: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """A left-padded batch."""
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def assert_same_answers(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    inputs = padded()
    kept = inputs["attention_mask"].bool()
    assert_close(model(**inputs).logits[kept], dense(**inputs).logits[kept])
    greedy = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **greedy), dense.generate(**inputs, **greedy))


@pytest.mark.parametrize("bits", WIDTHS)
def test_case_1_every_uniform_width(patched: PreTrainedModel, reference: DenseReference, bits: int) -> None:
    patched.pagedweight.set_bits(bits)
    assert_same_answers(patched, reference.set_bits(bits))


@pytest.mark.parametrize("seed", range(3))
def test_mixed_widths(patched: PreTrainedModel, reference: DenseReference, seed: int) -> None:
    bits = np.random.default_rng(seed).choice(WIDTHS, patched.pagedweight.layout.rows)
    patched.pagedweight.set_bits(bits)
    assert (patched.pagedweight.snapshot().bits == bits).all()
    assert_same_answers(patched, reference.set_bits(bits))
    patched.pagedweight.check()


def test_one_block_at_a_lower_width_is_seen(patched: PreTrainedModel, reference: DenseReference) -> None:
    """The comparison above could not tell widths apart if a single block's width did not show."""
    ids = tokens(2, 40)
    with torch.no_grad():
        bits = np.full(reference.layout.rows, 6)
        before = reference.set_bits(bits)(ids).logits
        bits[1] = 2
        after = reference.set_bits(bits)(ids).logits
    assert (after - before).abs().max() > 1e-2 * before.abs().max()


@torch.no_grad()
def test_distance_to_the_original_model(patched: PreTrainedModel, family: str) -> None:
    """Printed beside the widths; the quantizer's own error, so only its order is checked."""
    original = FAMILIES[family]()
    inputs = padded()
    expected = original(**inputs).logits.log_softmax(-1)
    kept = inputs["attention_mask"].bool()
    divergences = {}
    for bits in WIDTHS:
        patched.pagedweight.set_bits(bits)
        got = patched(**inputs).logits.log_softmax(-1)
        divergences[bits] = float((expected.exp() * (expected - got)).sum(-1)[kept].mean())
    print(f"{family}: KL to the original by width: {', '.join(f'{b}: {kl:.2e}' for b, kl in divergences.items())}")
    assert divergences[6] < divergences[2]
    assert divergences[6] >= 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(family: str, dtype: torch.dtype) -> None:
    ids = tokens(2, 9)
    model = pagedweight.load(quantized_folder(family), dtype=dtype)
    dense = DenseReference.of(FAMILIES[family]().to(dtype), quantized_folder(family)).set_bits(6)
    with torch.no_grad():
        got, expected = one_layer(model, ids), one_layer(dense, ids)
    assert got.dtype == dtype
    assert_close(got, expected)


def one_layer(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The first layer's experts on the same inputs: behind it, rounding may flip a later router's choice."""
    experts = model.model.layers[0].mlp.experts if hasattr(model.model.layers[0].mlp, "experts") else None
    experts = experts or model.model.layers[0].experts
    hidden = model.model.embed_tokens(ids).flatten(0, 1)
    hidden = hidden / hidden.float().pow(2).mean(-1, keepdim=True).sqrt().to(hidden.dtype)
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(hidden.shape[0], experts.num_experts, generator=generator).topk(2).indices
    weights = torch.rand(index.shape, generator=generator).to(hidden.dtype)
    return experts(hidden, index, weights)


@pytest.mark.parametrize("renormalised", [False, True])
def test_case_46_routing_weights_and_shared_expert_stay_the_models_own(renormalised: bool, tmp_path: Path) -> None:
    """At 8 bits, where every weight of so short a row has a code of its own, the answers are the dense model's."""
    model = qwen2_moe_q60(num_experts=6, norm_topk_prob=renormalised)
    seen = []
    ids = tokens(2, 9)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.shared_expert.down_proj.weight.normal_(std=0.5)
            layer.mlp.shared_expert_gate.weight.normal_(std=5)
        expected = model(ids).logits
        pagedweight.patch(model, checkpoint=pagedweight.quantize(model, tmp_path / "pages", widths=(2, 8)))
        experts = model.model.layers[0].mlp.experts
        experts.register_forward_pre_hook(lambda module, args: seen.append(args[2].sum(-1)))
        got = model(ids).logits
        model.model.layers[0].mlp.shared_expert_gate.weight.zero_()
        other_gate = model(ids).logits
    total = torch.ones_like(seen[0])
    assert torch.allclose(seen[0], total) is renormalised
    assert (seen[0] <= total + 1e-6).all()
    assert_close(got, expected, torch.float16)
    assert (other_gate - got).abs().max() > 1e-3 * got.abs().max()


@torch.no_grad()
def test_case_48_router_logits_and_return_types_are_the_models_own() -> None:
    model, dense = mixtral_m8(), DenseReference("M8").set_bits(6)
    pagedweight.patch(model, checkpoint=quantized_folder("M8"))
    inputs = {"input_ids": tokens(2, 9), "output_router_logits": True}
    got, expected = model(**inputs), dense(**inputs)
    assert type(got) is type(expected)
    assert torch.equal(got.router_logits[0], expected.router_logits[0])
    assert_close(got.router_logits[1], expected.router_logits[1])
    assert type(model.model.layers[0].mlp(got.logits[..., :64])) is torch.Tensor
