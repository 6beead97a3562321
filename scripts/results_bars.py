"""The results page's summary: what was asked of each measurement, what came out, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.comparisons import chance_of_more, holm
from bench.policies_plans import BF16, FULL
from bench.policies_report import window_kl
from bench.quality_parts import bootstrap_ratio
from scripts.results_evaluation import Pair, pairs_of
from scripts.results_gains import gains
from scripts.results_policies import OWN
from scripts.results_tables import Lines, table

Record = Mapping[str, Any]
TABLES = {"lut16": "16-bit tables", "fast": "byte tables"}
SHAPES = {"qwen": "Qwen", "mixtral": "Mixtral"}
MOVING = "slower_than_still"
MIXED_TIME, MOVING_TIME = 0.02, 0.03  # more than uniform widths take, than pages that stand still
EVALUATION_MINUTES = 20


class Bar(NamedTuple):
    """One line of the summary. met: None where a figure is shown beside others without a bar of its own."""

    what: str
    wanted: str
    measured: str
    met: bool | None

    def cells(self) -> tuple[str, ...]:
        return self.what, self.wanted, self.measured, {True: "met", False: "missed", None: ""}[self.met]


def summary(policies: Sequence[Record], speeds: Sequence[Record], evaluations: Sequence[Record]) -> Lines:
    """Every bar with its figure; nothing is written here that the records do not hold."""
    bars = [*kl_bars(policies, evaluations), *steadiness(speeds), *evaluation_bars(evaluations)]
    yield from table(["what", "wanted", "measured", ""], [bar.cells() for bar in bars])
    yield from gains([record for record in speeds if record.get("model", "qwen") == "qwen"])


def kl_bars(policies: Iterable[Record], evaluations: Iterable[Record]) -> Iterator[Bar]:
    """The full planner's KL beside every baseline's, at every budget of every model."""
    planned = [
        Pair(f"{record['settings']['model']}, {name} at {bits} bits", own, other)
        for record in policies
        for name in record["cells"].keys() - {FULL, BF16, *OWN}
        for bits in record["settings"]["budgets"]
        for own, other in [[window_kl(record["cells"], policy, bits) for policy in (FULL, name)]]
        if len(own) == len(other)
    ]
    tasks = [pair for record in evaluations for pair in pairs_of(record)]
    for what, pairs in (("over 128 windows of two texts", planned), ("over texts and gold answers", tasks)):
        if pairs:
            alone = sum(bootstrap_ratio(pair.own, pair.other)[0] > 1 for pair in pairs)
            together = int(holm([chance_of_more(pair.own, pair.other) for pair in pairs]).sum())
            found = f"{alone} of {len(pairs)} beyond the 95 % interval, {together} after Holm's correction"
            yield Bar(f"KL of the full planner above another policy's, {what}", "never", found, not together)


def steadiness(records: Sequence[Record]) -> Iterator[Bar]:
    """What mixed widths and moving pages cost, where they cost most."""
    bars = (
        ("time of mixed widths beside the uniform one of the same bytes", "paged", "slower_than_uniform", MIXED_TIME),
        ("time while pages leave and come back, beside the same steps held still", "moving", MOVING, MOVING_TIME),
    )
    for what, part, figure, limit in bars:
        for codebooks, tables in TABLES.items():
            found = [
                (row[figure], place(record, row))
                for record in records
                for row in record.get(part, [])
                if figure in row and row["codebooks"].startswith(codebooks)
            ]
            yield from _most(f"{what}, {tables}", found, limit)


def _most(what: str, found: Sequence[tuple[float, str]], limit: float) -> Iterator[Bar]:
    if found:
        most, where = max(found)
        within = sum(time <= limit for time, _ in found)
        measured = f"{within} of {len(found)} rows within; {100 * min(found)[0]:+.1f} to {100 * most:+.1f} % ({where})"
        yield Bar(what, f"at most +{100 * limit:.0f} %", measured, most <= limit)


def place(record: Record, row: Record) -> str:
    bits = f", {row['width']} bits" if "width" in row else ""
    compiled = ", compiled" if record.get("compiled") else ""
    return f"{SHAPES[record.get('model', 'qwen')]}, B = {row['batch']}{bits}{compiled}"


def evaluation_bars(records: Iterable[Record]) -> Iterator[Bar]:
    """How long the whole evaluation of a small model takes without a GPU."""
    for record in records:
        if not record["machine"]["device"].startswith("NVIDIA"):
            seconds = sum(
                cell.get("seconds", 0.0)
                for budgets in record["cells"].values()
                for tasks in budgets.values()
                for cell in tasks.values()
            )
            yield Bar(
                f"whole evaluation of {record['settings']['checkpoint']}, CPU, {record['machine']['threads']} thread",
                f"{EVALUATION_MINUTES} minutes",
                f"{seconds / 60:.1f} minutes",
                seconds <= 60 * EVALUATION_MINUTES,
            )
