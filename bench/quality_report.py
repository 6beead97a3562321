"""The markdown of bench/quality.py, from the JSON of one or more models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from bench.quality_damage import PLAN_MEAN_BITS, PREDICTIONS, RESIDUALS, SINGLE_BLOCK_BITS
from bench.quality_parts import IMPORTANCE_1, METHODS, WIDTHS, bootstrap, bootstrap_ratio

Cell = dict[str, dict[str, list[float]]]


def report(records: list[dict[str, Any]]) -> str:
    return "\n".join(["# Quality by level and width\n", *map(_model, records)])


def _model(content: Mapping[str, Any]) -> str:
    settings = content["settings"]
    lines = [f"## {settings['model']}", ""]
    lines += [f"{settings['windows']} windows of {settings['tokens']} tokens per text; {content['machine']}", ""]
    lines += _uniform_lines(content["cells"], settings["texts"])
    sizes = ", ".join(f"{bits}: {codes:,} / {true:,}" for bits, (codes, true) in content["bytes"].items())
    lines += ["", f"Bytes of the experts by width, codes alone / with 16-bit tables: {sizes}"]
    if content["damage"]:
        lines += _damage_lines(content["damage"])
    return "\n".join(lines) + "\n"


def _uniform_lines(cells: Mapping[str, Cell], texts: list[str]) -> list[str]:
    names = [f"{text} {figure}" for text in texts for figure in ("perplexity", "KL, nats", "top-1")]
    lines = ["| bits | method | " + " | ".join(names) + " | KL beside importance 1 |"]
    lines += ["|" + " --- |" * (len(names) + 3), "| 16 | bf16 | " + " | ".join(_figures(cells["bf16"], texts)) + " | |"]
    for bits in WIDTHS:
        for method in METHODS:
            cell, other = cells.get(f"{method}/{bits}"), cells.get(f"{IMPORTANCE_1}/{bits}")
            if cell and other:
                above, below = _pooled_kl(cell), _pooled_kl(other)
                low, high = bootstrap_ratio(above, below)
                ratio = f"{above.mean() / below.mean():.2f} ({low:.2f} to {high:.2f})"
                lines += [f"| {bits} | {method} | " + " | ".join(_figures(cell, texts)) + f" | {ratio} |"]
    return lines


def _pooled_kl(cell: Cell) -> np.ndarray:
    return np.concatenate([np.array(figures["kl"]) for figures in cell.values()])


def _figures(cell: Cell, texts: list[str]) -> list[str]:
    out = []
    for text in texts:
        loss, kl, agreement = (np.array(cell[text][name]) for name in ("loss", "kl", "agreement"))
        low, high = bootstrap(kl)
        out += [f"{math.exp(loss.mean()):.2f}", f"{kl.mean():.5f} ({low:.5f} to {high:.5f})"]
        out += [f"{100 * agreement.mean():.1f} %"]
    return out


def _damage_lines(damage: Mapping[str, dict[str, Any]]) -> list[str]:
    lines = ["", "| predicted damage | method | single blocks | plans at equal code bytes |", "|" + " --- |" * 4]
    for method, found in damage.items():
        for form in PREDICTIONS:
            ranks = [spearmanr(found[what][form], found[what]["measured"])[0] for what in ("blocks", "plans")]
            lines += [f"| {form} | {method} | {ranks[0]:.3f} | {ranks[1]:.3f} |"]
        counts = [len(found[what]["measured"]) for what in ("blocks", "plans")]
    lines += ["", f"Rank correlation with measured KL: {counts[0]} blocks alone at {SINGLE_BLOCK_BITS} bits,"]
    lines += [f"{counts[1]} random plans within 1 % of {PLAN_MEAN_BITS} mean code bits."]
    for method, found in damage.items():
        lines += ["", f"Held-out R^2 of the log residual, {method}:", ""]
        lines += ["| projection | transition | " + " | ".join(RESIDUALS) + " |", "|" + " --- |" * (2 + len(RESIDUALS))]
        for projection, transitions in found["residual"].items():
            lines += [f"| {projection} | {t} | " + " | ".join(map(str, r2)) + " |" for t, r2 in transitions.items()]
    return lines
