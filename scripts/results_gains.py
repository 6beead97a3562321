"""The summary's table of the paper's two cases: memory saved and tokens/s beside bf16, in every form measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.e2e.drawn import SHAPES
from bench.e2e.throughput_peers import FUSED, GROUPED, NO_TIME, NOT_COMPILED
from scripts.results_tables import Lines, table

Record = Mapping[str, Any]
CODEBOOKS = "fast"  # byte tables


class Case(NamedTuple):
    """One batch at one width, with the routed experts paged or the shared ones too; saved, times: what is wanted."""

    batch: int
    width: int
    shared: bool
    saved: float | None
    times: float

    def title(self) -> str:
        paged = "routed and shared experts" if self.shared else "routed experts"
        return f"B = {self.batch}, {self.width} bits, {paged}"

    def of(self, records: Sequence[Record], *, compiled: bool) -> Record | None:
        """The record that holds the case beside HF's experts."""
        kind = [r for r in records if bool(r.get("shared")) == self.shared and bool(r.get("compiled")) == compiled]
        return next((record for record in kind if self.beside(record, GROUPED)), None)

    def beside(self, record: Record, against: str) -> Mapping[str, Any] | None:
        wanted = self.batch, self.width, CODEBOOKS, against
        bars = record.get("bars", [])
        return next((b for b in bars if (b["batch"], b["width"], b["codebooks"], b["against"]) == wanted), None)

    def rows(self, record: Record, part: str) -> list[Mapping[str, Any]]:
        """Of this width and byte tables."""
        of_batch = [row for row in record.get(part, []) if row["batch"] == self.batch]
        return [row for row in of_batch if (row.get("width"), row.get("codebooks")) == (self.width, CODEBOOKS)]

    def judged(self, value: float, wanted: float | None, text: str) -> str:
        return text if wanted is None else f"{text}, {'met' if value >= wanted else 'missed'}"


CASES = (
    Case(1, 3, False, 0.69, 1.94),
    Case(1, 3, True, 0.72, 1.94),
    Case(4, 4, False, 0.63, 1.57),
    Case(4, 4, True, None, 1.57),
)
Cell = Callable[[Case], str | None]


def gains(records: Sequence[Record]) -> Lines:
    """A line for each form, a column for each case; forms that no record has are left out."""
    lines = [(name, *(cell(case) or "-" for case in CASES)) for name, cell in forms(records)]
    rows = [line for line in lines if set(line[1:]) != {"-"}]
    if rows:
        yield from table(["beside HF bf16 (grouped_mm)", *(case.title() for case in CASES)], rows)


def forms(records: Sequence[Record]) -> Iterator[tuple[str, Cell]]:
    plain, compiled = ({case: case.of(records, compiled=compiled) for case in CASES} for compiled in (False, True))

    def times(found: Mapping[Case, Record | None], against: str, *, bar: bool) -> Cell:
        def cell(case: Case) -> str | None:
            beside = case.beside(found[case], against) if found[case] else None
            if beside is None:
                return None
            value = beside["times_tokens_per_second"]
            return case.judged(value, case.times if bar else None, f"{value:.2f}")

        return cell

    yield "memory wanted", lambda case: None if case.saved is None else f"{100 * case.saved:.0f} %"
    yield "memory saved", lambda case: saved(case, plain[case])
    yield "*memory saved by codes alone, all else as bf16's*", lambda case: codes_alone(case, plain[case])
    yield "times tokens/s wanted", lambda case: f"{case.times}"
    yield "times tokens/s, every step one graph", times(plain, GROUPED, bar=True)
    yield "*with no experts at all*", lambda case: limit(case, plain[case])
    yield "layers compiled in both, one graph", times(compiled, GROUPED, bar=True)
    yield "*with no experts at all*", lambda case: limit(case, compiled[case])
    # Not judged: what the compiler gains is not ours.
    yield "ours compiled, bf16 not, one graph", times(compiled, NOT_COMPILED, bar=False)
    yield "generate, no graphs, in both", lambda case: called(case, plain[case], "generate", "generate")
    yield (
        "generate as transformers compiles it, in both",
        lambda case: called(case, plain[case], "compiled generate", "compiled generate"),
    )
    yield "ours one graph, bf16 as generate calls it", lambda case: called(case, plain[case], "paged", "generate")
    yield "beside vLLM's bf16 experts, every step one graph", times(plain, FUSED, bar=False)
    yield "beside vLLM's bf16 experts, layers compiled in both", times(compiled, FUSED, bar=False)


def saved(case: Case, record: Record | None) -> str | None:
    if record is None:
        return None
    share = case.beside(record, GROUPED)["memory_saved"]
    return case.judged(share, case.saved, f"{100 * share:.2f} %")


def codes_alone(case: Case, record: Record | None) -> str | None:
    """Were routed experts nothing but their codes, without tables, and all else as in bf16's own run."""
    if record is None or case.shared:
        return None
    config = SHAPES[record.get("model", "qwen")][1]()
    weights = record["layers"] * config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size
    dense = next(row for row in record["dense"] if (row["experts"], row["batch"]) == (GROUPED, case.batch))
    return f"{100 * (2 - case.width / 8) * weights / dense['peak_reserved_bytes']:.2f} %"


def limit(case: Case, record: Record | None) -> str | None:
    """What a step without any routed experts would be."""
    none = None if record is None or case.shared else case.beside(record, NO_TIME)
    if none is None:
        return None
    own = case.beside(record, GROUPED)["times_tokens_per_second"]
    return f"{own / none['times_tokens_per_second']:.2f}"


def called(case: Case, record: Record | None, own: str, dense: str) -> str | None:
    """Beside bf16 as generate calls it, with the kind of cache that is faster there."""
    if record is None:
        return None
    of_batch = [row for row in record.get(dense, []) if row["batch"] == case.batch and "width" not in row]
    ours = [row for row in case.rows(record, own) if row["experts"] == "uniform"]
    if not of_batch or not ours:
        return None
    value = ours[0]["tokens_per_second"] / max(row["tokens_per_second"] for row in of_batch)
    return case.judged(value, case.times, f"{value:.2f}")
