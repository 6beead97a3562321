"""Memory and faults of a patched model: pages left in the checkpoint, forwards that fail, killed processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import Cache, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.checkpoint import Checkpoint
from pagedweight.runtime.frames import OutOfFrames
from tests.e2e.test_pressure import tight
from tests.hf_models import mixtral_m8, quantized_folder, tokens

PROMPT = tokens(2, 8)
GREEDY = {"do_sample": False, "max_new_tokens": 40, "attention_mask": torch.ones_like(PROMPT)}


def generate(model: PreTrainedModel) -> torch.Tensor:
    cache = model.pagedweight.new_cache()
    output = model.generate(PROMPT, past_key_values=cache, **GREEDY)
    cache.release()
    return output


def page_bytes(model: PreTrainedModel) -> int:
    """Host memory that pages take, tables left out."""
    host = model.pagedweight.store.host
    return host.bytes - int(host.sizes.table_frames.sum()) * host.sizes.frame_bytes


def test_pages_that_stay_in_the_checkpoint_give_the_same_tokens_under_pressure() -> None:
    kept, mapped = tight("M8"), tight("M8", host_pinned_bytes=0)
    assert page_bytes(kept) > 0
    assert page_bytes(mapped) == 0
    assert torch.equal(generate(mapped), generate(kept))
    moves = mapped.pagedweight.snapshot().moves
    assert moves.lowered_rows > 0
    assert moves.written_back_bytes == 0
    mapped.pagedweight.check()


def test_a_model_patched_in_memory_needs_no_checkpoint() -> None:
    model = pagedweight.patch(mixtral_m8(), config=RuntimeConfig(budget_bytes=2**26, host_pinned_bytes=0))
    wanted = model(PROMPT).logits
    for bits in (2, 6):
        model.pagedweight.set_bits(bits)
    assert torch.equal(model(PROMPT).logits, wanted)
    assert page_bytes(model) > 0


def test_a_forward_that_fails_half_way_leaves_states_true_and_the_next_ones_right() -> None:
    model = tight("M8")
    expected = generate(tight("M8"))
    calls = iter(range(10**6))

    def fail_once(*_: object) -> None:
        if next(calls) == 20:
            raise RuntimeError("a fault in the middle of a forward")

    hook = model.model.layers[1].register_forward_pre_hook(fail_once)
    cache = model.pagedweight.new_cache()
    with pytest.raises(RuntimeError, match="in the middle"):
        model.generate(PROMPT, past_key_values=cache, **GREEDY)
    model.pagedweight.check()
    with pytest.raises(ValueError, match="reset"):
        model(PROMPT[:, :1], past_key_values=cache)
    cache.release()
    hook.remove()
    for _ in range(40):
        model.pagedweight.boundary()
    assert model.pagedweight.snapshot().kv_bytes == 0
    assert torch.equal(generate(model), expected)
    model.pagedweight.check()


@torch.no_grad()
def grow_in_turns(model: PreTrainedModel, *caches: Cache) -> None:
    for cache in itertools.cycle(caches):
        model(PROMPT[:, :4], past_key_values=cache)


def test_a_cache_is_unharmed_when_its_frames_make_way_for_a_table() -> None:
    """Two caches grow in turns and one ends: what is free lies between the other's frames; tables need neighbours."""
    model = tight("M8", offload_free_blocks=0, reload_free_blocks=1, min_dwell_steps=0)
    runtime = model.pagedweight
    staying, leaving = runtime.new_cache(), runtime.new_cache()
    with runtime.held_at(2), pytest.raises(OutOfFrames):
        grow_in_turns(model, staying, leaving)
    before = [slab.read() for layer in staying.layers for slab in layer._slabs]
    leaving.release()
    for _ in range(40):
        runtime.boundary()
    after = [slab.read() for layer in staying.layers for slab in layer._slabs]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert runtime.snapshot().moves.relocated_bytes > 0
    runtime.check()


KILLED = """
import sys, torch, pagedweight
from pagedweight import RuntimeConfig
torch.set_num_threads(1)
model = pagedweight.load(sys.argv[1], config=RuntimeConfig(budget_bytes=2**26, host_pinned_bytes=0))
while True:
    for bits in (2, 6):
        model.pagedweight.set_bits(bits)
    print("moved", flush=True)
"""


def test_a_process_killed_while_pages_move_leaves_a_checkpoint_that_loads() -> None:
    folder = quantized_folder("M8")
    wanted = pagedweight.load(folder)(PROMPT).logits
    before = sorted(path.name for path in Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else []
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "moved\n"
        child.kill()
    assert child.returncode < 0
    after = sorted(path.name for path in Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else []
    assert not [name for name in set(after) - set(before) if name.startswith("torch_")]
    Checkpoint.open(folder).verify()
    assert torch.equal(pagedweight.load(folder)(PROMPT).logits, wanted)
