"""Frames copied from host memory and across the device, by address."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import numpy as np
import torch


class PageLoad(NamedTuple):
    """host: uint8, a page's bytes; address: int64 (frames,), where each of its frames goes."""

    host: torch.Tensor
    address: np.ndarray


class FrameCopies(Protocol):
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy frames on the device, between the forwards launched so far and those launched next. No target is also a
        source."""
        ...

    def load(self, pages: list[PageLoad]) -> None:
        """Start to copy pages in, after the forwards launched so far, beside those launched next."""
        ...

    def join(self) -> None:
        """Forwards launched next come after every load started so far; nothing waits on the host."""
        ...

    def read(self, source: np.ndarray) -> torch.Tensor:
        """Frames as uint8 on the host; waits for the device. For checks."""
        ...


class HostFrameCopies:
    """On a CPU, where everything is done at once."""

    def __init__(self, frame_bytes: int) -> None:
        self._frame_bytes = frame_bytes

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        for from_address, to_address in zip(source.tolist(), target.tolist(), strict=True):
            ctypes.memmove(to_address, from_address, self._frame_bytes)

    def load(self, pages: list[PageLoad]) -> None:
        for page in pages:
            first = page.host.data_ptr()
            for number, address in enumerate(page.address.tolist()):
                ctypes.memmove(address, first + number * self._frame_bytes, self._frame_bytes)

    def join(self) -> None:
        return None

    def read(self, source: np.ndarray) -> torch.Tensor:
        found = torch.empty(len(source) * self._frame_bytes, dtype=torch.uint8)
        target = found.data_ptr() + np.arange(len(source)) * self._frame_bytes
        self.move(source, target)
        return found
