"""Ctrl-C in the middle of generate: no frame is lost, page states are true, and the next call is right."""

from contextlib import suppress

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from tests.e2e.test_pressure import tight
from tests.hf_models import tokens
from tests.interrupting import Interrupts

PROMPT = tokens(2, 8)
GREEDY = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones_like(PROMPT)}
WHERE = ("runtime/", "integrations/", "patching_model.py")


def test_an_interrupt_at_any_line_of_generate_loses_no_frame_and_the_next_call_is_right():
    model, rng = tight("M8"), np.random.default_rng(0)
    paged, struck = model.pagedweight, set()
    expected = model.generate(PROMPT, past_key_values=paged.new_cache(), **GREEDY)
    whole = Interrupts(None, WHERE)
    with whole.running():
        model.generate(PROMPT, past_key_values=paged.new_cache(), **GREEDY)
    for at in rng.integers(1, whole.seen, 10):
        cache, interrupts = paged.new_cache(), Interrupts(int(at), WHERE)
        with suppress(KeyboardInterrupt), interrupts.running():
            model.generate(PROMPT, past_key_values=cache, **GREEDY)
        struck.add(interrupts.struck)
        paged.check()
        assert paged.snapshot().kv_bytes == cache.held_bytes, interrupts.struck
        cache.release()
        assert paged.snapshot().kv_bytes == 0, interrupts.struck
        assert torch.equal(model.generate(PROMPT, past_key_values=cache, **GREEDY), expected), interrupts.struck
        cache.release()
    assert len(struck) > 6
