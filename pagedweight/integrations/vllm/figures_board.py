"""Figures that one process writes and others read, without a message: a small file mapped into memory by each."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from pagedweight.integrations.vllm.report import Figures


class FiguresBoard:
    """The board of one vLLM instance, by its id. A reader may see figures of two moments mixed, never half a number."""

    def __init__(self, instance_id: str, *, write: bool = False) -> None:
        self._path = Path(tempfile.gettempdir()) / f"pagedweight-{instance_id}.figures"
        self._board: np.memmap | None = None
        if write:
            self._board = np.memmap(self._path, dtype=np.float64, mode="w+", shape=len(Figures._fields))

    def write(self, figures: Figures) -> None:
        self._board[:] = figures

    def read(self) -> Figures | None:
        """None while there is no writer."""
        if self._board is None:
            if not self._path.is_file() or self._path.stat().st_size != 8 * len(Figures._fields):
                return None
            self._board = np.memmap(self._path, dtype=np.float64, mode="r")
        return Figures(*self._board.tolist())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
