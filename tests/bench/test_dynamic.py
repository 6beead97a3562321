"""The dynamic run: its uniform widths lose what a whole forward does, and what moves stays within their peak memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import pagedweight
from bench.e2e.dynamic import Run, lines, measure
from pagedweight.calibration.divergence import diverge
from pagedweight.demo.run import CHECKPOINT
from pagedweight.evaluation.items import Size
from pagedweight.evaluation.record import Record
from pagedweight.evaluation.run import Plan


class Silent:
    """In the place of rich's bars."""

    def add_task(self, name: str, total: int) -> int:
        return 0

    def advance(self, task: int) -> None:
        return None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("dynamic")
    text = "A long road leads from the village over the bridge and through the wood to the old mill. " * 60
    (folder / "text.txt").write_text(text)
    plan = Plan(CHECKPOINT, {"text": folder / "text.txt"}, (), (), None, Size(256, 4), device="cpu")
    made = Run(plan, 4, 64, Record(folder / "dynamic.json", plan.settings(), "cpu"))
    measure(made, [3], Silent())
    return made


def test_uniform_widths_lose_what_one_forward_does(run: Run) -> None:
    model = pagedweight.from_pretrained(CHECKPOINT, dtype=torch.float32)
    model.pagedweight.set_bits(3)
    whole = diverge(model, run.references["text"], run.tasks["text"].scored)
    np.testing.assert_allclose(run.record.content["cells"]["uniform"]["3"]["text"]["kl"], whole.kl, rtol=1e-3)


def test_what_moves_stays_within_the_uniform_widths_peak(run: Run) -> None:
    cells = json.loads(run.record.path.read_text())["cells"]
    uniform, moving = cells["uniform"]["3"]["text"], cells["dynamic"]["3"]["text"]
    assert moving["peak_bytes"] <= moving["budget_bytes"] == uniform["peak_bytes"]
    bits = [row[1] for row in moving["over_tokens"]]
    assert bits[0] > bits[-1]
    assert bits == sorted(bits, reverse=True)
    assert np.mean(moving["kl"]) < np.mean(uniform["kl"])
    assert "text 3 bits" in lines(run.record.content)[0]
