"""Families with gates, biases and layouts of their own on a CUDA device, against the dense model of the same codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import pagedweight
from tests.hf_families import SERVED, family_model
from tests.hf_models import DenseReference, tokens
from tests.support import assert_close

pytestmark = pytest.mark.gpu

UNUSUAL = ("aria_text", "dbrx", "deepseek_v4", "gemma4_text", "gpt_oss", "hy_v4", "llama4_text", "nemotron_h")


@pytest.mark.parametrize("name", [name for name in UNUSUAL if name in SERVED])
@torch.no_grad()
def test_a_family_on_the_device_equals_its_codes(name: str, tmp_path: Path) -> None:
    ids = tokens(3, 9, seed=1).cuda()
    pagedweight.quantize(family_model(name), tmp_path, widths=(2, 4))
    reference = DenseReference.of(family_model(name).cuda(), tmp_path)
    model = pagedweight.load(
        tmp_path, device_map="cuda", attn_implementation=reference.model.config._attn_implementation
    )
    for bits in (2, 4):
        model.pagedweight.set_bits(bits)
        dense = reference.set_bits(bits)
        assert_close(model(ids).logits, dense(ids).logits)
        greedy = [m.generate(ids, max_new_tokens=8, do_sample=False) for m in (model, dense)]
        assert torch.equal(*greedy)
    model.pagedweight.check()
