"""One rank's experts from loading to serving, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.integrations.vllm.commands import Seating, StepCommands
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.page_source import DrawnPages
from pagedweight.integrations.vllm.rank_experts import RankExperts
from pagedweight.integrations.vllm.shares import ExpertShare

EXPERTS, HIDDEN, INTERMEDIATE, BLOCKS = 4, 64, 32, 9


def loaded_rank(**options: object) -> RankExperts:
    chosen = ServingOptions(widths=(2, 3, 4), frame_bytes=256, statistics_slots=2, **options)
    rank = RankExperts(DrawnPages(chosen), chosen, torch.device("cpu"), (16,), lambda: 256)
    rank.add(ExpertShare(0, tuple(range(EXPERTS)), EXPERTS, HIDDEN, INTERMEDIATE, "silu"))
    return rank


def forward(experts: torch.nn.Module) -> torch.Tensor:
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(10).view(5, 2) % EXPERTS
    return experts(hidden, ids, torch.full((5, 2), 0.5))


def test_case_86_nothing_is_taken_or_given_back_until_there_are_kv_blocks() -> None:
    """What an engine measures while it profiles is what stays: planes and tables of the lowest width."""
    rank = loaded_rank()
    experts = rank.fill(0, None)
    held = experts.tables.memory.data_ptr(), [address.tolist() for address in experts.tables[1:3]]
    first, second = forward(experts), forward(experts)
    assert torch.equal(first, second)
    assert held == (experts.tables.memory.data_ptr(), [address.tolist() for address in experts.tables[1:3]])
    assert (rank.bits() == 2).all()
    report = rank.attach([torch.zeros(BLOCKS, 2, 256, dtype=torch.uint8)], BLOCKS)
    assert (rank.bits() == 2).all(), "widths are the engine's to raise, once it has a scheduler"
    assert report.resident_width == 2
    assert report.frames_per_block == 2


def test_fixed_widths_keep_no_copy_on_the_host_and_no_statistics_by_request() -> None:
    rank = loaded_rank(bits=4)
    experts = rank.fill(0, None)
    forward(experts)
    rank.check()
    assert (rank.bits() == 4).all()
    assert len(experts.stats.mass) == 1


def test_a_layer_that_comes_too_late_is_refused() -> None:
    rank = loaded_rank()
    rank.fill(0, None)
    with pytest.raises(RuntimeError, match="build the whole model first"):
        rank.add(ExpertShare(1, (0,), 1, HIDDEN, INTERMEDIATE, "silu"))


def test_statistics_know_whose_tokens_they_are_once_batches_are_told() -> None:
    rank = loaded_rank()
    experts = rank.fill(0, None)
    rank.attach([torch.zeros(BLOCKS, 2, 256, dtype=torch.uint8)], BLOCKS)
    rank.knows_requests = True
    rank.boundary(StepCommands(seating=Seating(entered=(("a", 0), ("b", 1)), cleared=(0, 1))), 5)
    rank.mark(["b", "a"], np.array([2, 3]))
    forward(experts)
    counts = experts.stats.counts.sum((1, 2)).tolist()
    assert counts == [6, 4], "each token is routed twice"
