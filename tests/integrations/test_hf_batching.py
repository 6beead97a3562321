"""Continuous batching of a patched model: generate()'s own tokens, one boundary a step, padding not counted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")
pytest.importorskip("psutil", reason="continuous batching needs psutil")

import transformers
from packaging.version import Version
from transformers import ContinuousBatchingConfig, GenerationConfig

import pagedweight
from pagedweight.experts import TokenSlots
from pagedweight.integrations.hf_hooks import set_packed_slots
from tests.hf_models import quantized_folder, tokens

PAGE = "page_size" if Version(transformers.__version__) >= Version("5.18") else "block_size"
NEW_TOKENS = 6


@pytest.mark.parametrize("bits", [6, 3])
def test_tokens_are_those_of_generate(bits: int) -> None:
    model = pagedweight.load(quantized_folder("M8"))
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 3)]
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, **{PAGE: 16})
    paged = model.pagedweight
    paged.set_bits(bits)  # and there they stay: nothing presses
    wanted = [model.generate(torch.tensor([p]), settings)[0, len(p) :].tolist() for p in prompts]
    paged.begin_requests(1)
    step = paged.snapshot().step
    answers = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)
    assert [answer.generated_tokens for answer in answers.values()] == wanted
    assert paged.snapshot().step == step + NEW_TOKENS
    # Prompts and all but the last token, in two layers, two experts each.
    assert int(paged.stats.counts.sum()) == 4 * (sum(map(len, prompts)) + len(prompts) * (NEW_TOKENS - 1))


@pytest.mark.parametrize(("max_requests", "expected"), [(1, [0, 0, 0, 0, -1, -1]), (2, [0, 0, 0, 1, -1, -1])])
def test_packed_sequences_have_a_slot_each_and_what_follows_is_padding(max_requests: int, expected: list[int]) -> None:
    slots = TokenSlots(8)
    set_packed_slots(slots, torch.tensor([0, 3, 4], dtype=torch.int32), 6, max_requests)
    assert slots.view(6).tolist() == expected
