"""The whole way on a CUDA device: Triton kernels, the copy stream and KV frames in one arena."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from tests.e2e.test_pressure import Step, watch
from tests.hf_models import DenseReference

pytestmark = pytest.mark.gpu

SHIPPED = Path(pagedweight.__file__).parent / "assets" / "tiny-qwen2-moe"
TEXT = SHIPPED.parent / "heldout" / "heldout.txt"
# Mean KL in nats of the next-token distribution; a bit of width is worth 1e-3 (5 to 6 bits) and more.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-3, torch.float16: 1e-4}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    return tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :512].cuda()


def load(dtype: torch.dtype, **config) -> PreTrainedModel:
    return pagedweight.load(SHIPPED, config=RuntimeConfig(**config), dtype=dtype, device_map="cuda", verify=False)


def reference(dtype: torch.dtype) -> DenseReference:
    return DenseReference.of(pagedweight.unpatch(load(dtype)), SHIPPED)


def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    expected, got = expected.float().log_softmax(-1), got.float().log_softmax(-1)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@torch.no_grad()
def test_every_uniform_width_equals_the_codes(dtype: torch.dtype, ids: torch.Tensor) -> None:
    model, dense = load(dtype), reference(dtype)
    for bits in (2, 3, 4, 5, 6):
        model.pagedweight.set_bits(bits)
        distance = divergence(dense.set_bits(bits)(ids).logits, model(ids).logits)
        print(f"{dtype}, {bits} bits: KL {distance:.1e}")
        assert distance < CLOSE[dtype]
    model.pagedweight.check()


@torch.no_grad()
def replayed(dense: DenseReference, steps: list[Step]) -> list[torch.Tensor]:
    """The last position's logits of the dense model, its weights rebuilt before every forward."""
    cache = DynamicCache(config=dense.model.config)
    name = "cache" if "cache" in inspect.signature(dense.model.forward).parameters else "past_key_values"
    return [dense.set_bits(s.bits)(s.ids, use_cache=True, **{name: cache}).logits[:, -1] for s in steps]


@pytest.mark.parametrize("deterministic", [False, True])
def test_generating_under_a_budget(deterministic: bool, ids: torch.Tensor) -> None:
    settings = {"budget_bytes": 9 * 2**20, "offload_free_blocks": 4, "reload_free_blocks": 8}
    model = load(torch.float32, **settings, deterministic=deterministic)
    runtime = model.pagedweight
    before = runtime.snapshot()
    allocated = torch.cuda.memory_allocated()
    steps = watch(model)
    cache = runtime.new_cache()
    output = model.generate(
        ids[:, :64],
        past_key_values=cache,
        min_new_tokens=300,
        max_new_tokens=300,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    pressed = runtime.snapshot()
    print(f"mean bits {before.mean_bits:.2f} -> {pressed.mean_bits:.2f}, KV {pressed.kv_bytes}, {pressed.moves}")
    assert pressed.mean_bits < before.mean_bits
    assert pressed.kv_bytes == cache.held_bytes > 0
    assert len({tuple(step.bits) for step in steps}) > 3

    got = torch.cat(output.logits)
    assert divergence(torch.cat(replayed(reference(torch.float32), steps)), got) < CLOSE[torch.float32]

    del output, got
    cache.release()
    for _ in range(100):
        runtime.boundary()
        torch.cuda.synchronize()
    assert runtime.snapshot().mean_bits > pressed.mean_bits
    assert torch.cuda.memory_allocated() < allocated + 2**24
    runtime.check()
    runtime.close()
