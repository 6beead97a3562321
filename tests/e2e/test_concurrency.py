"""Several requests, models and threads in one process, processes that fork, and what is left when a model is gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from tests.e2e.test_determinism import SHIPPED, answer, pressed
from tests.e2e.test_pressure import tight
from tests.hf_models import quantized_folder, tokens

ROOT = Path(__file__).parents[2]


def generate(model: PreTrainedModel, seed: int = 0, new_tokens: int = 24) -> torch.Tensor:
    cache = model.pagedweight.new_cache()
    prompt = tokens(2, 7, seed)
    answer = model.generate(prompt, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False)
    cache.release()
    return answer


def planner_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pagedweight")]


def test_a_model_generates_while_others_are_patched_and_unpatched() -> None:
    other = tight("M8")
    wanted = generate(tight("M8", deterministic=True))
    over = threading.Event()

    def patch_and_unpatch() -> int:
        rounds = 0
        while not over.is_set() or not rounds:
            pagedweight.patch(pagedweight.unpatch(other), checkpoint=quantized_folder("M8"))
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as beside:
        rounds = beside.submit(patch_and_unpatch)
        try:
            one = tight("M8", deterministic=True)
            answer = generate(one)
        finally:
            over.set()
        assert rounds.result() > 0
    assert torch.equal(answer, wanted)
    one.pagedweight.check()
    other.pagedweight.check()


def test_two_models_of_one_process_generate_at_once_as_each_would_alone() -> None:
    settings = {"deterministic": True, "background_rows": 1}
    wanted = [generate(tight("M8", **settings), seed) for seed in range(2)]
    models = [tight("M8", **settings) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(generate, models, range(2)))
    assert all(torch.equal(*pair) for pair in zip(wanted, together, strict=True))
    for model in models:
        model.pagedweight.check()


def test_sequences_of_one_model_take_turns_in_caches_of_their_own() -> None:
    """Forward by forward: what a sequence answers does not depend on who stands between its forwards."""
    model = tight("M8")
    with model.pagedweight.held_at(2), torch.no_grad():
        alone = [generate(model, seed, 8)[:, 7:] for seed in range(3)]
        caches = [model.pagedweight.new_cache() for _ in range(3)]
        ids, answers = [tokens(2, 7, seed) for seed in range(3)], [[], [], []]
        for _ in range(8):
            for at, cache in enumerate(caches):
                ids[at] = model(ids[at], past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
                answers[at].append(ids[at])
    for wanted, got in zip(alone, answers, strict=True):
        assert torch.equal(torch.cat(got, 1), wanted)


def test_closing_twice_and_taking_off_a_closed_one() -> None:
    model = tight("M8", background_rows=1)
    generate(model, new_tokens=4)
    model.pagedweight.close()
    model.pagedweight.close()
    assert not planner_threads()
    assert model(tokens(2, 7)).logits.isfinite().all()
    with pytest.raises(RuntimeError, match=r"closed.*patch the model again"):
        model.pagedweight.set_bits(2)


def test_a_model_that_is_dropped_leaves_no_thread_and_no_arena() -> None:
    model = tight("M8", background_rows=1)
    generate(model, new_tokens=12)
    assert planner_threads()
    arena, runtime = weakref.ref(model.pagedweight.arena), weakref.ref(model.pagedweight)
    del model
    gc.collect()
    assert runtime() is None
    assert arena() is None
    for thread in threading.enumerate():
        if thread.name.startswith("pagedweight"):
            thread.join(timeout=10)
    assert not planner_threads()


_FORK = """
import os, signal, sys, torch
torch.set_num_threads(1)
from tests.e2e.test_concurrency import generate, tight
model = tight("M8", background_rows=1, deterministic=True)
generate(model, 3, 12)  # the planner's thread is there
child = os.fork()
signal.alarm(60)
if not child:
    generate(model, 5, 12)
    model.pagedweight.check()
    model.pagedweight.close()
    sys.exit(7)
generate(model, 6, 12)
model.pagedweight.check()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
child = os.fork()
if not child:
    sys.exit(8)  # without a word to the model
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
print("both lived")
"""


def test_a_forked_process_serves_or_ends_as_its_parent_does() -> None:
    """The planner's thread stays behind in the parent; nobody waits for it in the child."""
    ran = subprocess.run([sys.executable, "-c", _FORK], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert ran.stdout.strip() == "both lived", ran.stderr[-2000:]


def test_threads_read_pages_of_one_checkpoint_at_once() -> None:
    """Readers keep no position in the file that another thread could move."""
    config = RuntimeConfig(host_pinned_bytes=0)
    model = pagedweight.load(quantized_folder("M8"), config=config, verify=False)
    store = model.pagedweight.store
    wanted = [store.host.page(row, 3).clone() for row in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            got = threads.map(lambda row: store.host.page(row, 3), range(4))
            assert all(torch.equal(*pair) for pair in zip(wanted, got, strict=True))


@pytest.mark.gpu
def test_two_models_on_one_gpu_generate_at_once_as_each_would_alone() -> None:
    wanted = answer(pressed("cuda"))
    models = [pressed("cuda") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(answer, models))
    for widths, logits in together:
        assert widths == wanted[0]
        assert torch.equal(logits, wanted[1])
    for model in models:
        model.pagedweight.check()


@pytest.mark.gpu
def test_a_model_on_a_gpu_generates_while_others_are_patched_and_unpatched() -> None:
    wanted, other = answer(pressed("cuda")), pressed("cuda")
    over = threading.Event()

    def patch_and_unpatch() -> None:
        while not over.is_set():
            pagedweight.patch(pagedweight.unpatch(other), checkpoint=SHIPPED)

    with ThreadPoolExecutor(1) as beside:
        rounds = beside.submit(patch_and_unpatch)
        try:
            widths, logits = answer(pressed("cuda"))
        finally:
            over.set()
        rounds.result()
    assert widths == wanted[0]
    assert torch.equal(logits, wanted[1])


_FORK_CUDA = """
import os, signal, sys, torch
from tests.e2e.test_determinism import answer, pressed
model = pressed("cuda")
answer(model)
signal.alarm(100)
for use in (False, True):
    child = os.fork()
    if not child:
        try:
            if use:
                answer(model)
        except RuntimeError as error:
            print("in the child:", str(error).splitlines()[0], flush=True)
            sys.exit(9)
        sys.exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (9 if use else 8)
answer(model)
model.pagedweight.check()
print("the parent lived")
"""


@pytest.mark.gpu
def test_what_forks_from_a_process_with_a_gpu_may_end_and_is_told_that_it_cannot_use_it() -> None:
    """PyTorch aborts a process that destroys its parent's events; ours are left alone (runtime/forks.py)."""
    ran = subprocess.run([sys.executable, "-c", _FORK_CUDA], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert "in the child: Cannot re-initialize CUDA in forked subprocess" in ran.stdout, ran.stdout + ran.stderr[-2000:]
    assert "the parent lived" in ran.stdout, ran.stderr[-2000:]
