"""Ctrl-C in the middle of generate: no frame is lost, page states are true, and the next call is right."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from pagedweight.integrations.hf_cache import ArenaCache
from pagedweight.integrations.kv_places import Places, SlabShape
from pagedweight.integrations.kv_pool import FrameHoldings, KVPool
from pagedweight.integrations.kv_slab import Slab, Span, grow
from pagedweight.runtime.frames import Arena
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


LEAVING = {
    "window": (lambda slab: slab.drop_before(9), slice(9, None)),
    "crop": (lambda slab: slab.drop_from(6), slice(6)),
}


@pytest.mark.parametrize("name", LEAVING)
def test_an_interrupt_at_any_line_of_giving_columns_back_leaves_the_tokens_that_a_slab_says_it_holds(name: str):
    shape, (leave, kept) = SlabShape(1, 8, torch.float32), LEAVING[name]
    states = torch.randn(2, 1, 14, 8)

    def leaving(interrupts: Interrupts) -> Slab:
        arena = Arena(64 * 128, 128)
        slab = Slab(Places(arena, shape), FrameHoldings(arena))
        grow(KVPool(arena, [(shape, shape)], 4), slab._holdings, [Span(slab, 0, 14)], 2)
        slab.write(states)
        assert torch.equal(slab.read(), states)
        with suppress(KeyboardInterrupt), interrupts.running():
            leave(slab)
        return slab

    whole = Interrupts(None, ("kv_slab.py", "kv_pool.py"))
    assert torch.equal(leaving(whole).read(), states[:, :, kept])
    for at in range(1, whole.seen + 1):
        slab = leaving(interrupts := Interrupts(at, ("kv_slab.py", "kv_pool.py")))
        expected = states[:, :, kept] if slab.tokens < 14 else states
        assert torch.equal(slab.read(), expected), interrupts.struck
        assert slab.frames.size == slab._holdings.frames, interrupts.struck


SWAPPED = torch.tensor([1, 0])
REBUILDING = {
    "reorder": lambda cache: cache.reorder_cache(SWAPPED),
    "select": lambda cache: cache.batch_select_indices(SWAPPED),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("name", REBUILDING)
def test_an_interrupt_at_any_line_of_a_change_of_the_batch_leaves_all_layers_as_before_or_all_after(name: str):
    model, rng = tight("M8"), np.random.default_rng(0)
    following = tokens(4, 1)

    def answers(change: Callable[[ArenaCache], None], interrupts: Interrupts) -> torch.Tensor:
        cache = model.pagedweight.new_cache()
        model(PROMPT, past_key_values=cache)
        with suppress(KeyboardInterrupt), interrupts.running():
            change(cache)
        batch = cache.layers[0]._slabs[0].batch
        logits = model(following[:batch], past_key_values=cache).logits
        cache.release()
        return logits

    with model.pagedweight.held_at(4):
        before, whole = answers(lambda cache: None, Interrupts(None, WHERE)), Interrupts(None, WHERE)
        after = answers(REBUILDING[name], whole)
        assert before.shape != after.shape or not torch.equal(before, after)
        for at in rng.integers(1, whole.seen, 12):
            got = answers(REBUILDING[name], interrupts := Interrupts(int(at), WHERE))
            assert any(torch.equal(got, one) for one in (before, after)), interrupts.struck
