"""Ranks that must agree, and rows that stand for one expert of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.integrations.vllm.rank_experts import RankReport
from pagedweight.integrations.vllm.rank_merge import check_alike, merged_signals, policy_of_ranks
from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy
from pagedweight.runtime.observe import Signals

WIDTHS = (2, 4)
CODEBOOKS = dict.fromkeys(WIDTHS, "lut16")


def layout(experts: int) -> Layout:
    return Layout((MoeLayer(0, experts, 64, 32), MoeLayer(2, experts, 64, 32)), WIDTHS, CODEBOOKS)


def report(experts: tuple[int, ...], **changes: object) -> RankReport:
    here = layout(len(experts))
    made = RankReport(here, np.full(here.rows, 2), 128, 24, 2, 1000, (experts, experts), None)
    return made._replace(**changes)


def whole_policy() -> Policy:
    whole = layout(4)
    random = np.random.default_rng(0)
    return Policy.from_sensitivity(whole, random.random((whole.rows, 2)), random.random(whole.rows))


def test_tensor_parallel_ranks_keep_the_policy() -> None:
    whole = whole_policy()
    merged = policy_of_ranks(whole, [report((0, 1, 2, 3))] * 2)
    np.testing.assert_allclose(merged.sensitivity, whole.sensitivity)


def test_damage_of_a_row_is_that_of_its_expert_on_every_rank() -> None:
    whole = whole_policy()
    merged = policy_of_ranks(whole, [report((0, 2)), report((1, 3))])
    merged.check_layout(layout(2))
    by_expert = whole.sensitivity.reshape(2, 4, 2, 2)
    together = by_expert[:, [0, 2]] + by_expert[:, [1, 3]]
    np.testing.assert_allclose(merged.sensitivity.reshape(2, 2, 2, 2), together)


@pytest.mark.parametrize(
    "changes",
    [{"frames_per_block": 23}, {"frame_bytes": 256}, {"layout": layout(3)}, {"plane_frames": np.full(8, 3)}],
    ids=lambda changes: next(iter(changes)),
)
def test_case_99_ranks_that_count_otherwise_are_refused_at_the_start(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rank 1"):
        check_alike([report((0, 1)), report((2, 3), **changes)])


def test_signals_of_expert_ranks_add_up_and_of_others_are_the_first() -> None:
    first = Signals(torch.tensor([[0.25, 0.75]]), torch.tensor([30.0]), torch.ones(1, 2, 2, 3), torch.ones(1, 2))
    second = Signals(torch.tensor([[0.5, 0.5]]), torch.tensor([10.0]), torch.zeros(1, 2, 2, 3), torch.ones(1, 2))
    assert merged_signals([first, second], by_expert_rank=False) is first
    merged = merged_signals([first, second], by_expert_rank=True)
    torch.testing.assert_close(merged.mass, torch.tensor([[0.3125, 0.6875]]))
    assert merged.routed.item() == 40
    assert merged_signals([first, None], by_expert_rank=True) is None
