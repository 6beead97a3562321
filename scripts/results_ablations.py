"""Sections of the results page about what is stored: levels of the quantizer, and codebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.quality_parts import IMPORTANCE_1, ROUNDING_NATS, bootstrap_ratio
from scripts.results_tables import Lines, made_by, table

FIRST_CODEBOOK = "lut16"


def levels(record: Mapping[str, Any]) -> Lines:
    """KL of each level beside plain k-means."""
    settings, cells = record["settings"], record["cells"]
    kl: dict[str, dict[str, np.ndarray]] = {}
    for name, texts in cells.items():
        method, separator, bits = name.rpartition("/")
        if separator:
            kl.setdefault(method, {})[bits] = np.concatenate([np.array(text["kl"]) for text in texts.values()])
    if IMPORTANCE_1 not in kl:
        return
    yield f"### {settings['model']}"
    yield ""
    yield from _beside(IMPORTANCE_1, kl)
    yield from _made_over(record)


def codebooks(record: Mapping[str, Any]) -> Lines:
    """KL of each codebook beside 16-bit tables, at the last of the levels that were measured."""
    settings = record["settings"]
    for level, found in list(record["kl_nats"].items())[-1:]:
        kl = {name: {bits: np.array(values) for bits, values in by_bits.items()} for name, by_bits in found.items()}
        yield f"### {settings['model']}, level {level}, parent width {settings['parent']}"
        yield ""
        yield from _beside(FIRST_CODEBOOK, kl)
    yield from _made_over(record)


def _made_over(record: Mapping[str, Any]) -> Lines:
    yield f"Uniform widths, {2 * record['settings']['windows']} windows."
    yield ""
    yield from made_by(record, record["machine"])


def _beside(first: str, kl: Mapping[str, Mapping[str, np.ndarray]]) -> Lines:
    """The first one's KL in 10^-3 nats, of the others how many times that with its 95 % interval."""
    widths = sorted(kl[first], key=float)
    rows = [(first, *(f"**{1e3 * kl[first][bits].mean():.3f}**" for bits in widths))]
    for name, own in kl.items():
        if name != first:
            rows.append((name, *(_ratio(own.get(bits), kl[first][bits]) for bits in widths)))
    yield from table(["KL, 10^-3 nats, then times that", *(f"{bits} bits" for bits in widths)], rows)


def _ratio(own: np.ndarray | None, first: np.ndarray) -> str:
    if own is None or len(own) != len(first) or first.mean() < ROUNDING_NATS:
        return "-"
    low, high = bootstrap_ratio(own, first)
    return f"{own.mean() / first.mean():.2f} ({low:.2f} to {high:.2f})"
