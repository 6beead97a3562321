"""Frames copied by address, interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pagedweight.kernels.copy_frames import launch_copy_frames


@pytest.mark.parametrize("frame_bytes", [128, 22528, 65536])  # one block, not a power of two, several programs
def test_frames_arrive_and_nothing_else_changes(frame_bytes: int) -> None:
    memory = torch.randint(0, 256, (8, frame_bytes + 128), dtype=torch.uint8)
    before = memory.clone()
    address = memory.data_ptr() + torch.arange(8) * (frame_bytes + 128)
    source, target = torch.tensor([6, 0, 3]), torch.tensor([1, 7, 2])
    launch_copy_frames(address[source], address[target], frame_bytes)
    before[target, :frame_bytes] = before[source, :frame_bytes]
    assert torch.equal(memory, before)


def test_no_frames_are_no_launch() -> None:
    launch_copy_frames(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 128)


@pytest.mark.parametrize(
    ("source", "target", "frame_bytes"),
    [([1], [1, 2], 128), ([1.0], [2.0], 128), ([16], [32], 8), ([16], [32], 132)],
)
def test_tables_that_do_not_fit_are_refused(source: list, target: list, frame_bytes: int) -> None:
    with pytest.raises(ValueError, match="give"):
        launch_copy_frames(torch.tensor(source), torch.tensor(target), frame_bytes)
