"""What the engine's scheduler tells others: figures on the board, seldom enough to cost nothing, and never stale."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: see docs/vllm.md")

from pagedweight.integrations.vllm.figures_board import FiguresBoard
from pagedweight.integrations.vllm.report import Figures
from pagedweight.integrations.vllm.scheduler import BOARD_SECONDS, WeightsYield
from pagedweight.integrations.vllm.tenant import Counts

pytestmark = pytest.mark.vllm


class Shown(WeightsYield):
    """A scheduler as far as its board goes, with figures that differ each time they are taken."""

    def __init__(self) -> None:
        self.running = ["a request"]
        self.weights = SimpleNamespace(counts=Counts())
        self.taken = 0
        self._board = FiguresBoard("shown", write=True)
        self._on_board, self._board_due = None, 0.0

    def _figures(self) -> Figures:
        self.taken += 1
        return Figures(*[self.taken] * len(Figures._fields))


def test_the_board_follows_counts_at_once_the_rest_once_in_a_while_and_an_idle_engine_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scheduler = Shown()
    reader = FiguresBoard("shown")

    def kv_bytes(after_seconds: float) -> float:
        scheduler._show(100 + after_seconds * BOARD_SECONDS)
        return reader.read().kv_bytes

    assert [kv_bytes(0), kv_bytes(0.1), kv_bytes(0.9), kv_bytes(1.1)] == [1, 1, 1, 2]
    scheduler.weights.counts = scheduler.weights.counts._replace(lowered=1)
    assert [kv_bytes(1.2), kv_bytes(1.3)] == [3, 3]
    scheduler.running = []
    assert kv_bytes(1.4) == 4, "what requests held stays on the board for as long as the engine is idle"
