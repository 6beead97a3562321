"""Sections of the results page about tasks: `pagedweight eval`, and the run in which the KV cache grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bench.comparisons import CHANCE_ABOVE, benjamini_hochberg, chance_of_more, holm
from bench.quality_parts import bootstrap_ratio
from pagedweight.evaluation.methods import FULL, REFERENCE
from pagedweight.evaluation.report import rows as evaluation_rows
from scripts.results_tables import Lines, made_by, table

NONE = "none"


class Pair(NamedTuple):
    """Two methods' KL of the same items, ours first."""

    name: str
    own: np.ndarray
    other: np.ndarray


def evaluation(record: Mapping[str, Any]) -> Lines:
    """What `pagedweight eval` wrote."""
    settings, rows = record["settings"], evaluation_rows(record)
    tasks = list(settings["tasks"])
    yield f"### {settings['checkpoint']}, {settings['count']} items a task of at most {settings['tokens']} tokens"
    yield ""
    yield from table(
        ["method", "budget, bits", "bits", "MB", *tasks],
        (
            (
                row["method"],
                row["budget"],
                "" if row["bits"] is None else f"{row['bits']:.2f}",
                "" if row["weight_bytes"] is None else f"{row['weight_bytes'] / 1e6:.2f}",
                *(of_task(row["tasks"][task]) if task in row["tasks"] else "" for task in tasks),
            )
            for row in rows
        ),
    )
    yield (
        "Of a text its perplexity, of gold answers nats a token; then mean KL to the unquantized model in 10^-3 nats, "
        "and how often both like the same token best, in per cent. A text's second halves count, with the first as "
        "context."
    )
    yield ""
    yield verdict(list(pairs_of(record)))
    if "note" in record:
        yield record["note"]
    yield ""
    wall, cpu = (sum(cell.get(name, 0.0) for cell in _cells(record)) / 60 for name in ("seconds", "cpu_seconds"))
    device = record["machine"]["device"]
    yield from made_by(record, f"{device}, {wall:.1f} minutes of measuring, {cpu:.1f} of them the process's own")


def pairs_of(record: Mapping[str, Any]) -> Iterator[Pair]:
    """The full planner beside every other method, by budget and task."""
    cells = record["cells"]
    for other in sorted(cells.keys() - {FULL, REFERENCE}):
        for budget, tasks in sorted(cells.get(FULL, {}).items()):
            for task, own in tasks.items():
                beside = cells[other].get(budget, {}).get(task)
                if beside and len(beside["kl"]) == len(own["kl"]):
                    yield Pair(f"{task} at {budget} ({other})", np.array(own["kl"]), np.array(beside["kl"]))


def verdict(pairs: list[Pair]) -> str:
    """What many comparisons say together: beyond single intervals, and what is left after corrections for many."""
    if not pairs:
        return ""
    intervals = [bootstrap_ratio(pair.own, pair.other) for pair in pairs]
    chances = [chance_of_more(pair.own, pair.other) for pair in pairs]

    def named(chosen: Iterable[bool]) -> str:
        names = [pair.name for pair, yes in zip(pairs, chosen, strict=True) if yes]
        return f"{len(names)} ({'; '.join(names)})" if names else NONE

    below, above = sum(high < 1 for _, high in intervals), named(low > 1 for low, _ in intervals)
    found = (
        f"Of {len(pairs)} comparisons of KL over the same items, ours is below the other's beyond the 95 % interval in "
        f"{below}, above it in {above}; if nothing differed, {CHANCE_ABOVE * len(pairs):.1f} would be above by chance."
    )
    if above == NONE:
        return found
    return (
        f"{found} Corrected for their number (sign flips of the items), above: {named(holm(chances))} after Holm, 5 % "
        f"that any is false; {named(benjamini_hochberg(chances))} after Benjamini and Hochberg, 5 % of them false."
    )


def _cells(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for budgets in record["cells"].values():
        for tasks in budgets.values():
            yield from tasks.values()


def of_task(task: Mapping[str, float]) -> str:
    lost = task.get("perplexity", task.get("nats"))
    return f"{lost:.3f} / {1e3 * task['kl']:.3f} / {100 * task['agreement']:.1f}"


def dynamic(record: Mapping[str, Any]) -> Lines:
    """Table 2's regime: bits change while the cache grows."""
    settings, cells, pairs = record["settings"], record["cells"], []
    yield f"### {settings['checkpoint']}, {settings['batch']} sequences of {settings['tokens']} tokens in one budget"
    yield ""
    rows = []
    for width, tasks in cells["dynamic"].items():
        for task, moving in tasks.items():
            uniform = cells["uniform"][width][task]
            kl = [np.array(cell["kl"]) for cell in (uniform, moving)]
            low, high = bootstrap_ratio(kl[1], kl[0])
            first, last = moving["bits"]
            pairs.append(Pair(f"{task} at {width}", kl[1], kl[0]))
            rows.append(
                (
                    f"{task}, uniform {width}",
                    f"{uniform['peak_bytes'] / 1e6:.2f} / {moving['peak_bytes'] / 1e6:.2f}",
                    f"{first:.2f} to {last:.2f}",
                    f"{1e3 * kl[0].mean():.3f} / {1e3 * kl[1].mean():.3f}",
                    f"{kl[1].mean() / kl[0].mean():.2f} ({low:.2f} to {high:.2f})",
                    f"{np.mean(uniform['loss']):.4f} / {np.mean(moving['loss']):.4f}",
                )
            )
    yield from table(
        ["task and width", "peak MB, both", "bits while it grows", "KL, 10^-3 nats", "ratio", "loss, nats"], rows
    )
    yield (
        f"Weights and KV cache share a budget: the peak of the uniform width. {settings['count']} prompts a task are "
        f"read {settings['chunk']} tokens at a time; what counts is the text's second half or the gold answer, which "
        "come last. Each pair: uniform, then ours; the ratio of KL with its 95 % interval over the same items."
    )
    yield verdict(pairs)
    yield ""
    yield from made_by(record, record["machine"]["device"])
