"""Open cases of a patched model on a CUDA device: captured graphs, synchronisation, and what the driver sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from torch import nn
from transformers import PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.experts import PagedExperts
from pagedweight.runtime.frames import OwnerKind
from tests.hf_models import mixtral_m8
from tests.support import assert_close

pytestmark = pytest.mark.gpu


def patched() -> PreTrainedModel:
    return pagedweight.patch(mixtral_m8().cuda(), config=RuntimeConfig(budget_bytes=2**26))


def experts_of(model: nn.Module) -> PagedExperts:
    return next(module for module in model.modules() if isinstance(module, PagedExperts))


def routed(model: PreTrainedModel, tokens: int) -> tuple[torch.Tensor, ...]:
    """(hidden states, expert ids, weights) of so many tokens, two experts each."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    hidden = torch.randn(tokens, model.config.hidden_size, generator=generator, device="cuda")
    ids = torch.randint(model.config.num_local_experts, (tokens, 2), generator=generator, device="cuda")
    return hidden, ids, torch.rand(tokens, 2, generator=generator, device="cuda")


def captured(experts: PagedExperts, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        experts(*inputs)  # what is compiled at the first call is compiled before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts(*inputs)
    return graph, output


def test_case_65_a_captured_graph_follows_widths_and_frames() -> None:
    model = patched()
    runtime, experts = model.pagedweight, experts_of(model)
    inputs = routed(model, 4)
    graph, output = captured(experts, inputs)
    bits = runtime.snapshot().bits.copy()
    bits[:2] = 3  # expert 0
    runtime.set_bits(bits)
    free = np.flatnonzero(runtime.arena.kinds == OwnerKind.FREE)
    runtime.arena.rows[torch.from_numpy(free).cuda()] = 0xFF
    graph.replay()
    assert_close(output, experts(*inputs))
    assert output.isfinite().all()


def test_case_68_no_forward_and_no_boundary_waits_for_the_device() -> None:
    model = patched()
    runtime, experts = model.pagedweight, experts_of(model)
    inputs = routed(model, 4)
    experts(*inputs)
    runtime.boundary()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            runtime.boundary()
            experts(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_case_76_what_is_released_goes_to_the_cache_and_the_driver_sees_no_change() -> None:
    """Pages are smaller than the driver's granule: so nothing is counted as given back to it, and nothing is."""
    model = patched()
    runtime = model.pagedweight
    runtime.set_bits(2)
    runtime.set_bits(6)
    before, seen = torch.cuda.memory_reserved(), runtime.snapshot()
    runtime.set_bits(2)
    after = runtime.snapshot()
    assert torch.cuda.memory_reserved() == before
    assert sum(after.bytes_by_owner.values()) == sum(seen.bytes_by_owner.values())
    released = after.moves.released_bytes - seen.moves.released_bytes
    assert after.bytes_by_owner["free"] - seen.bytes_by_owner["free"] == released > 0


def requested_bytes() -> int:
    """What the allocator has been asked for: memory_allocated counts the rest of a cached block, up to 1 MiB that it
    does not divide, and so depends on what was freed before."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_case_76_a_plain_patch_reports_what_the_allocator_confirms() -> None:
    """Without a budget the arena is as large as the parent width needs: within 5 %, as for every reported byte."""
    model = mixtral_m8(hidden_size=256, intermediate_size=512).cuda()
    dense = sum(
        p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3
    )
    before = requested_bytes()
    runtime = pagedweight.patch(model).pagedweight
    held = requested_bytes() - before + dense
    reported = sum(runtime.snapshot().bytes_by_owner.values())
    assert dense > reported > 0
    assert abs(held - reported) <= 0.05 * reported
    runtime.set_bits(2)
    assert requested_bytes() - before + dense == held
