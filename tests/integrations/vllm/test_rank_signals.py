"""Readings of a rank's statistics: what was counted long ago weighs less, and a GPU says what the CPU says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.integrations.vllm.rank_signals import RankSignals
from pagedweight.layout import RoutingStats

SLOTS, LAYERS, EXPERTS = 3, 2, 5


def filled(device: str = "cpu") -> RoutingStats:
    """Statistics of some traffic, the same for every device."""
    stats = RoutingStats.zeros(SLOTS, LAYERS, EXPERTS, device)
    generator = torch.Generator().manual_seed(0)
    for table in stats:
        table.copy_((100 * torch.rand(table.shape, generator=generator)).to(table.dtype))
    return stats


def test_what_was_counted_before_weighs_half() -> None:
    stats = RoutingStats.zeros(1, 1, 2)
    signals = RankSignals(stats)
    stats.mass[0, 0], stats.counts[0, 0] = torch.tensor([8.0, 0.0]), torch.tensor([8, 0])
    assert signals.read(log_features=False).mass.tolist() == [[1, 0]]
    stats.mass[0, 0, 1] += 4
    stats.counts[0, 0, 1] += 4
    assert signals.read(log_features=False).mass.tolist() == [[0.5, 0.5]]


@pytest.mark.gpu
@pytest.mark.parametrize("held", [None, np.array([3, 0, 1], dtype=np.float32)])
def test_a_gpu_reads_what_a_cpu_reads(held: np.ndarray | None) -> None:
    here, there = RankSignals(filled()), RankSignals(filled("cuda"))
    assert there.read(log_features=True, kv_blocks=held) is None, "the first reading is on its way"
    for _ in range(3):  # each reading gives what the one before asked for
        expected = here.read(log_features=True, kv_blocks=held)
        torch.cuda.synchronize()
        found = there.read(log_features=True, kv_blocks=held)
        for one, other in zip(found[:4], expected[:4], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
