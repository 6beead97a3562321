"""The markdown of bench/policies.py: KL by policy and budget, each beside the full planner's over the same windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench.policies_plans import BF16, CONTESTS, FULL, UNIFORM
from bench.quality_parts import WIDTHS, bootstrap, bootstrap_ratio

Cell = dict[str, dict[str, list[float]]]
SIZES = ("code_bytes", "true_bytes")


def report(records: list[dict[str, Any]]) -> str:
    parts = ["# The planner beside other policies at the same bytes", *map(_model, records)]
    return "\n".join(parts)


def _model(record: Mapping[str, Any]) -> str:
    settings, cells = record["settings"], record["cells"]
    budgets = settings["budgets"]
    texts = {text: len(figures["kl"]) for text, figures in cells[FULL][str(budgets[0])].items()}
    skipped = f" after the first {settings['skip']}" if settings.get("skip") else ""
    windows = " and ".join(f"{count} windows of {text}{skipped}" for text, count in texts.items())
    counted = "planes alone" if settings["bytes"] == "code" else "planes and tables"
    planned = "each window's own signals" if settings["signals"] == "window" else "the first half, KL of the second"
    lines = [f"\n## {settings['model']}, budgets in bytes of {counted}, plans from {planned}\n"]
    lines += [f"{windows}, {settings['tokens']} tokens each; level {settings['method']}; {record['machine']};"]
    lines += [f"policy: {record['policy']}\n"]
    lines += ["KL to the bf16 model in 10^-3 nats per token; in brackets the policy's KL over the full planner's (95 %"]
    lines += ["interval, paired bootstrap over windows). Above 1 the planner is better.\n"]
    known = dict.fromkeys(contender.name for contest in CONTESTS.values() for contender in contest)
    names = [FULL, *(name for name in known if name in cells and name not in (FULL, BF16))]
    lines += _table(budgets, [(name, _columns(cells, name, budgets)) for name in names])
    lines += ["", "Perplexity, by text:\n"]
    lines += _table(budgets, [(name, _perplexities(cells, name, budgets)) for name in names])
    if BF16 in cells:
        lines += ["", f"bf16: {next(_perplexities(cells, BF16, [16.0]))}"]
    lines += [
        "",
        "Megabytes of expert weights: planes alone, and as the runtime holds them, tables and frames included:\n",
    ]
    lines += _table(budgets, [(name, sizes(cells, name, budgets)) for name in names])
    if BF16 in cells:
        lines += ["", f"bf16: {next(sizes(cells, BF16, [16.0]))}"]
    return "\n".join(lines) + "\n"


def _table(budgets: list[float], rows: list[tuple[str, Iterator[str]]]) -> list[str]:
    head = ["| policy | " + " | ".join(f"{bits} bits" for bits in budgets) + " |", "|" + " --- |" * (len(budgets) + 1)]
    return head + [f"| {name} | " + " | ".join(columns) + " |" for name, columns in rows]


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


def _perplexities(cells: Mapping[str, Any], name: str, budgets: list[float]) -> Iterator[str]:
    for bits in budgets:
        cell = cells[name].get(str(bits), {})
        yield " / ".join(f"{np.exp(np.mean(figures['loss'])):.3f}" for figures in cell.values())


def sizes(cells: Mapping[str, Any], name: str, budgets: list[float]) -> Iterator[str]:
    """Megabytes at each budget: of planes alone, and as the runtime holds them."""
    for bits in budgets:
        texts = list(cells[name].get(str(bits), {}).values())
        mean = [np.mean([np.mean(text[kind]) for text in texts]) / 1e6 for kind in SIZES if texts and kind in texts[0]]
        yield " / ".join(f"{size:.3f}" for size in mean)
