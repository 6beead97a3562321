"""The markdown of bench/policies.py: KL by policy and budget, each beside the full planner's over the same windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench.policies_plans import CONTENDERS, FULL, UNIFORM
from bench.quality_parts import WIDTHS, bootstrap, bootstrap_ratio

Cell = dict[str, dict[str, list[float]]]


def report(records: list[dict[str, Any]]) -> str:
    parts = ["# The planner beside other policies at the same bytes", *map(_model, records)]
    return "\n".join(parts)


def _model(record: Mapping[str, Any]) -> str:
    settings, cells = record["settings"], record["cells"]
    budgets = settings["budgets"]
    texts = {text: len(figures["kl"]) for text, figures in cells[FULL][str(budgets[0])].items()}
    windows = " and ".join(f"{count} windows of {text}" for text, count in texts.items())
    counted = "planes alone" if settings["bytes"] == "code" else "planes and tables"
    planned = "each window's own signals" if settings["signals"] == "window" else "the first half, KL of the second"
    lines = [f"\n## {settings['model']}, budgets in bytes of {counted}, plans from {planned}\n"]
    lines += [f"{windows}, {settings['tokens']} tokens each; level {settings['method']}; {record['machine']};"]
    lines += [f"policy: {record['policy']}\n"]
    lines += ["KL to the bf16 model in 10^-3 nats per token; in brackets the policy's KL over the full planner's (95 %"]
    lines += ["interval, paired bootstrap over windows). Above 1 the planner is better.\n"]
    lines += ["| policy | " + " | ".join(f"{bits} bits" for bits in budgets) + " |"]
    lines += ["|" + " --- |" * (len(budgets) + 1)]
    for contender in (CONTENDERS[-1], *CONTENDERS[:-1]):
        if contender.name in cells:
            lines += [f"| {contender.name} | " + " | ".join(_columns(cells, contender.name, budgets)) + " |"]
    lines += ["", "True bytes (planes and 16-bit tables) of each policy, in units of the full planner's:\n"]
    lines += ["| policy | " + " | ".join(f"{bits} bits" for bits in budgets) + " |"]
    lines += ["|" + " --- |" * (len(budgets) + 1)]
    for contender in CONTENDERS[1:]:
        if contender.name in cells:
            lines += [f"| {contender.name} | " + " | ".join(_sizes(cells, contender.name, budgets)) + " |"]
    return "\n".join(lines) + "\n"


def _columns(cells: Mapping[str, Any], name: str, budgets: list[float]) -> Iterator[str]:
    for bits in budgets:
        own, full = window_kl(cells, name, bits), window_kl(cells, FULL, bits)
        if len(own) != len(full):
            yield "measured in part"
        elif name == FULL:
            low, high = bootstrap(own)
            yield f"{1e3 * own.mean():.3f} ({1e3 * low:.3f} to {1e3 * high:.3f})"
        else:
            low, high = bootstrap_ratio(own, full)
            yield f"{1e3 * own.mean():.3f} [{own.mean() / full.mean():.3f}, {low:.3f} to {high:.3f}]"


def window_kl(cells: Mapping[str, Any], name: str, bits: float) -> np.ndarray:
    """One KL per window. Uniform widths are interpolated in log KL, which favours them: KL is convex in bits."""
    if name != UNIFORM:
        return _pooled(cells[name].get(str(bits), {}))
    at = {b: _pooled(cells[UNIFORM].get(str(float(b)), {})) for b in WIDTHS}
    below = max(b for b in WIDTHS if b <= bits)
    if below == bits:
        return at[below]
    share = bits - below
    return np.exp((1 - share) * np.log(at[below]) + share * np.log(at[below + 1]))


def _pooled(cell: Cell) -> np.ndarray:
    return np.concatenate([np.array(figures["kl"]) for figures in cell.values()]) if cell else np.empty(0)


def _sizes(cells: Mapping[str, Any], name: str, budgets: list[float]) -> Iterator[str]:
    for bits in budgets:
        own, full = (cells[n].get(str(bits), {}) for n in (name, FULL))
        means = [np.concatenate([f["true_bytes"] for f in cell.values()]).mean() for cell in (own, full) if cell]
        yield f"{means[0] / means[1]:.3f}" if len(means) == 2 else ""
