"""deterministic=True: what a model does does not depend on how fast anything is; and an arena beyond 2^31 bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from tests.e2e.test_pressure import tight, watch
from tests.hf_models import quantized_folder, tokens

SHIPPED = Path(pagedweight.__file__).parent / "assets" / "tiny-qwen2-moe"
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@contextmanager
def noise(device: str) -> Iterator[None]:
    """Something else wants the same processor, or the same device and bus."""
    over = threading.Event()

    def keep_busy() -> None:
        near = torch.ones(2**22).pin_memory() if device == "cuda" else torch.ones(2**16)
        stream = torch.cuda.Stream() if device == "cuda" else None
        while not over.is_set():
            with torch.cuda.stream(stream):
                near.to(device, non_blocking=True).mul_(3)
            if stream is not None:
                stream.synchronize()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    yield
    over.set()
    thread.join()


def answer(model: PreTrainedModel) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """Widths at every forward, and all logits, of a generation under pressure."""
    steps, prompt = watch(model), tokens(2, 7).to(model.device)
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 36}
    logits = model.generate(prompt, past_key_values=model.pagedweight.new_cache(), **options).logits
    return [tuple(step.bits) for step in steps], torch.stack(logits)


def pressed(device: str) -> PreTrainedModel:
    """Planned on a thread, copied as the device likes, and waited for at each boundary."""
    settings = {"deterministic": True, "background_rows": 1}
    if device == "cpu":
        return tight("M8", **settings)
    config = RuntimeConfig(budget_bytes=6 * 2**20, block_tokens=4, **settings)
    return pagedweight.load(SHIPPED, config=config, dtype=torch.bfloat16, device_map=device, verify=False)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_deterministic_runs_are_equal_bit_for_bit_whatever_else_happens(device: str) -> None:
    widths, logits = answer(pressed(device))
    with noise(device):
        again = answer(pressed(device))
    assert again[0] == widths
    assert torch.equal(again[1], logits)
    assert len(set(widths)) > 2


@pytest.mark.parametrize("device", ["cpu", GPU])
@torch.no_grad()
def test_an_arena_beyond_32_bits_gives_the_same_answers(device: str) -> None:
    """Pages and KV frames come from its high end, at offsets no 32-bit number holds. Unused, it costs no memory."""
    answers, prompt = [], tokens(2, 20).to(device)
    for budget_bytes in (2**26, 2**31 + 2**28):
        config = RuntimeConfig(budget_bytes=budget_bytes)
        model = pagedweight.load(quantized_folder("M8"), config=config, device_map=device, verify=False)
        cache = model.pagedweight.new_cache()
        for bits in (6, 3):
            model.pagedweight.set_bits(bits)
            answers.append(model(prompt, past_key_values=cache).logits)
        highest = int((model.pagedweight.arena.kinds != 0).nonzero()[0].max())
    assert highest * model.pagedweight.arena.frame_bytes > 2**31
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])
