"""Continuous batching in the arena of a GPU, eager and in captured graphs: tokens that do not depend on widths."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.integrations.hf_hooks import SECTORS
from tests.integrations.test_hf_batching_arena import answers, batching, coarse, resident_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec(SECTORS) is None, reason="sectors came with transformers 5.18"),
]


@pytest.fixture(scope="module", params=["M8", "G16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pagedweight.quantize(coarse(request.param), tmp_path_factory.mktemp(request.param), device="cpu")


@pytest.mark.parametrize("graphs", [False, True])
def test_requests_take_what_weights_give_up_and_tokens_are_exact(folder: Path, graphs: bool) -> None:
    settings = {"offload_free_blocks": 1, "reload_free_blocks": 3, "min_dwell_steps": 2, "plan_period_steps": 2}
    roomy = pagedweight.load(folder, config=RuntimeConfig(budget_bytes=2**24, **settings), device_map="cuda")
    options = batching(auto_switch_to_flash=False, use_cuda_graph=graphs)
    # Of the same batches, so that nothing but pressure is different.
    wanted = answers(roomy, options)
    paged = roomy.pagedweight
    floor = int(resident_bytes(paged.layout, paged.arena.frame_bytes)[:, 0].sum())
    config = RuntimeConfig(budget_bytes=floor + 40 * paged.kv.block_bytes, **settings)
    model = pagedweight.load(folder, config=config, device_map="cuda")
    seen: list[float] = []
    boundary = model.pagedweight.boundary

    def noted() -> None:
        boundary()
        seen.append(model.pagedweight.snapshot().mean_bits)

    model.pagedweight.boundary = noted
    assert answers(model, options) == wanted
    assert min(seen) < 6
    torch.cuda.synchronize()
    model.pagedweight.check()
