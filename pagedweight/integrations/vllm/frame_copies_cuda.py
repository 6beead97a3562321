"""Frames on a GPU: copied across it on the compute stream, and from page-locked host memory on a stream beside it."""

from __future__ import annotations

import numpy as np
import torch

from pagedweight.integrations.vllm.frame_copies import PageLoad
from pagedweight.kernels.copy_frames import launch_copy_frames

STAGING_BYTES = 64 * 2**20


class CudaFrameCopies:
    """Pages come to a staging buffer in one piece each, and from there to their frames, which lie scattered."""

    def __init__(self, frame_bytes: int, device: torch.device) -> None:
        self._frame_bytes = frame_bytes
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._staging = torch.empty(STAGING_BYTES // frame_bytes * frame_bytes, dtype=torch.uint8, device=device)

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        launch_copy_frames(self._on_device(source), self._on_device(target), self._frame_bytes)

    def load(self, pages: list[PageLoad]) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            while pages:
                batch = self._batch(pages)
                pages = pages[len(batch) :]
                self._scatter(batch)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def read(self, source: np.ndarray) -> torch.Tensor:
        found = torch.empty(len(source) * self._frame_bytes, dtype=torch.uint8, device=self._device)
        self.move(source, found.data_ptr() + np.arange(len(source), dtype=np.int64) * self._frame_bytes)
        return found.cpu()

    def _batch(self, pages: list[PageLoad]) -> list[PageLoad]:
        """The first pages that fit into the staging buffer together."""
        ends = np.cumsum([page.host.numel() for page in pages])
        if ends[0] > self._staging.numel():
            raise ValueError(f"a page has {ends[0]} bytes; the staging buffer takes {self._staging.numel()}")
        return pages[: int(np.searchsorted(ends, self._staging.numel(), side="right"))]

    def _scatter(self, batch: list[PageLoad]) -> None:
        at = 0
        for page in batch:
            self._staging[at : at + page.host.numel()].copy_(page.host, non_blocking=True)
            at += page.host.numel()
        target = np.concatenate([page.address for page in batch])
        source = self._staging.data_ptr() + np.arange(len(target), dtype=np.int64) * self._frame_bytes
        launch_copy_frames(self._on_device(source), self._on_device(target), self._frame_bytes)

    def _on_device(self, addresses: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(addresses).pin_memory().to(self._device, non_blocking=True)
