"""An evaluation as rows of a table: a method and a budget, and for each task what it lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedweight.evaluation.methods import REFERENCE

Cell = Mapping[str, Any]


def rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each method and budget, the reference first; each task has perplexity or nats, KL and agreement."""
    cells = content["cells"]
    order = sorted(cells, key=lambda method: method != REFERENCE)
    return [_row(method, budget, tasks) for method in order for budget, tasks in cells[method].items()]


def _row(method: str, budget: str, tasks: Mapping[str, Cell]) -> dict[str, Any]:
    sizes = {}
    for name in ("bits", "weight_bytes"):
        found = [cell[name] for cell in tasks.values() if name in cell]
        sizes[name] = float(np.mean(found)) if found else None
    return {"method": method, "budget": budget, **sizes, "tasks": {name: summary(cell) for name, cell in tasks.items()}}


def summary(cell: Cell) -> dict[str, float]:
    """perplexity of a text, nats per token of gold answers; mean KL in nats and share of equal top tokens."""
    loss = float(np.average(cell["loss"], weights=cell["tokens"]))
    lost = {"perplexity": math.exp(loss)} if cell["kind"] == "text" else {"nats": loss}
    weights = {"weights": cell["tokens"]}
    kl, agreement = (float(np.average(cell[name], **weights)) for name in ("kl", "agreement"))
    return {**lost, "kl": kl, "agreement": agreement}


def cells(task: Mapping[str, float]) -> tuple[str, str, str]:
    """Loss, KL and agreement as the printed table shows them."""
    lost = task.get("perplexity", task.get("nats"))
    return f"{lost:.3f}", f"{1e3 * task['kl']:.3f}", f"{100 * task['agreement']:.2f} %"
