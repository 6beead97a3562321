"""compile_kernels: what a patched model launches is there before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pagedweight
from tests.support import DEVICE

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"


def test_without_a_gpu_there_is_nothing_to_compile():
    assert pagedweight.compile_kernels(pagedweight.load(TINY, device_map="cpu")) == 0


def test_a_model_that_is_not_patched_is_refused():
    with pytest.raises(ValueError, match="Linear has no paged experts; patch it first"):
        pagedweight.compile_kernels(torch.nn.Linear(2, 2))


@pytest.mark.gpu
def test_forwards_after_it_compile_no_product_and_statistics_stay(monkeypatch):
    import triton

    model = pagedweight.load(TINY, device_map=str(DEVICE), dtype=torch.bfloat16)
    before = [tensor.clone() for tensor in model.pagedweight.stats]
    assert pagedweight.compile_kernels(model, batches=(1, 5, 100)) > 4
    assert all(map(torch.equal, model.pagedweight.stats, before))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: compiled.append(fn.jit_function.__name__)
    )
    for tokens in (1, 5, 100):
        with torch.no_grad():
            model(input_ids=torch.zeros((1, tokens), dtype=torch.int64, device=DEVICE))
    assert not {"_gate_up_kernel", "_down_kernel"} & set(compiled)
