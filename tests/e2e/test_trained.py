"""The trained model that ships with the package: same answers as its codes, and sensible distances to the original."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from tests.e2e.test_pressure import replay, watch
from tests.hf_models import DenseReference
from tests.support import assert_close

SHIPPED = Path(pagedweight.__file__).parent / "assets" / "tiny-qwen2-moe"
ORIGINAL = Path(__file__).parents[3] / "shared" / "models" / "tiny-qwen2-moe"
TEXT = SHIPPED.parent / "heldout" / "heldout.txt"
WIDTHS = (2, 3, 4, 5, 6)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    return tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :256]


@pytest.fixture(scope="module")
def patched() -> PreTrainedModel:
    return pagedweight.load(SHIPPED, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference() -> DenseReference:
    return DenseReference.of(pagedweight.unpatch(pagedweight.load(SHIPPED, dtype=torch.float32)), SHIPPED)


@torch.no_grad()
def test_every_uniform_width_equals_the_codes(
    patched: PreTrainedModel, reference: DenseReference, ids: torch.Tensor
) -> None:
    for bits in WIDTHS:
        patched.pagedweight.set_bits(bits)
        got, expected = patched(ids).logits, reference.set_bits(bits)(ids).logits
        assert_close(got, expected)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_generating_under_a_budget_equals_a_replay(reference: DenseReference, ids: torch.Tensor) -> None:
    config = RuntimeConfig(budget_bytes=9 * 2**20, offload_free_blocks=4, reload_free_blocks=8)
    model = pagedweight.load(SHIPPED, config=config, dtype=torch.float32, verify=False)
    before = model.pagedweight.snapshot()
    steps = watch(model)
    cache = model.pagedweight.new_cache()
    output = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
    pressed = model.pagedweight.snapshot()
    assert pressed.mean_bits < before.mean_bits
    assert pressed.kv_bytes == cache.held_bytes > 0
    answers = replay(reference, steps)
    assert torch.equal(torch.stack(answers, dim=1), output[:, ids.shape[1] :])
    cache.release()
    for _ in range(40):
        model.pagedweight.boundary()
    assert model.pagedweight.snapshot().mean_bits > pressed.mean_bits
    model.pagedweight.check()


@torch.no_grad()
def test_the_distance_to_the_original_shrinks_with_every_bit(patched: PreTrainedModel, ids: torch.Tensor) -> None:
    if not ORIGINAL.is_dir():
        pytest.skip(f"the original model is not at {ORIGINAL}")
    original = AutoModelForCausalLM.from_pretrained(ORIGINAL, dtype=torch.float32)
    expected = original(ids).logits.log_softmax(-1)
    divergences = []
    for bits in WIDTHS:
        patched.pagedweight.set_bits(bits)
        got = patched(ids).logits.log_softmax(-1)
        divergences.append(float((expected.exp() * (expected - got)).sum(-1).mean()))
    report = ", ".join(f"{bits}: {kl:.2e}" for bits, kl in zip(WIDTHS, divergences, strict=True))
    print(f"tiny-qwen2-moe: KL to the original by width: {report}")
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.01


@torch.no_grad()
def test_patching_the_original_gives_what_ships(patched: PreTrainedModel, ids: torch.Tensor) -> None:
    if not ORIGINAL.is_dir():
        pytest.skip(f"the original model is not at {ORIGINAL}")
    model = pagedweight.patch(AutoModelForCausalLM.from_pretrained(ORIGINAL, dtype=torch.float32), checkpoint=SHIPPED)
    for bits in (3, 6):
        model.pagedweight.set_bits(bits)
        patched.pagedweight.set_bits(bits)
        assert torch.equal(model(ids).logits, patched(ids).logits)
