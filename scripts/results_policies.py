"""Section of the results page about policies at the same bytes: Figure 5 and Table 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.policies_plans import BF16, FULL
from bench.policies_report import sizes, window_kl
from bench.quality_parts import bootstrap_ratio
from scripts.results_tables import Lines, made_by, table

ABLATIONS = ("w/o routing statistics", "w/o prompt residual", "w/o page movement", "w/o global sensitivity")
OWN = (*ABLATIONS, "buckets alone", "plain greedy", "column energies")


def policies(record: Mapping[str, Any]) -> Lines:
    """Figure 5's comparison and Table 4's ablations on one model."""
    settings, cells = record["settings"], record["cells"]
    budgets = settings["budgets"]
    counted = "planes" if settings["bytes"] == "code" else "planes and tables"
    yield f"### {settings['model']}, level {settings['method']}, budgets in bytes of {counted}"
    yield ""
    others = [name for name in cells if name not in (FULL, BF16, *OWN)]
    for names in (others, [name for name in OWN if name in cells]):
        rows = [(name, *(ratio(cells, name, bits)[0] for bits in budgets)) for name in names]
        full = (FULL, *(f"**{1e3 * window_kl(cells, FULL, bits).mean():.3f}**" for bits in budgets))
        yield from table(["policy", *(f"{bits} bits" for bits in budgets)], [full, *rows])
    windows = len(window_kl(cells, FULL, budgets[0]))
    seen = "its first half, KL is of the second" if settings["signals"] == "past" else "all of it"
    yield (
        "Mean KL to bf16 of the full planner in 10^-3 nats a token; of the others how many times that, with the 95 % "
        f"interval of a bootstrap over the same {windows} windows. Live policies plan each window from {seen}."
    )
    below = [f"{name} at {bits}" for name in cells for bits in budgets if ratio(cells, name, bits)[1] < 1]
    yield (f"Below the full planner's: {', '.join(below)}." if below else "None is below it beyond its interval.")
    yield ""
    if BF16 in cells:
        yield "Expert weights in MB, planes alone / as held with tables and frames:"
        yield ""
        rows = [(name, *sizes(cells, name, budgets)) for name in (FULL, *others)]
        yield from table(["policy", *(f"{bits} bits" for bits in budgets)], rows)
        yield f"In bf16 {next(sizes(cells, BF16, [16.0])).split(' / ')[0]} MB. Two neighbouring widths are held both."
        yield ""
    yield from made_by(record, record["machine"])


def ratio(cells: Mapping[str, Any], name: str, bits: float) -> tuple[str, float]:
    """As the table shows it, and the interval's upper end."""
    if name in (FULL, BF16):
        return "", 1.0
    own, full = window_kl(cells, name, bits), window_kl(cells, FULL, bits)
    if len(own) != len(full):
        return "-", 1.0
    low, high = bootstrap_ratio(own, full)
    return f"{own.mean() / full.mean():.2f} ({low:.2f} to {high:.2f})", high
