"""Change one place of the runtime at a time and see whether its tests notice.

    pip install -e '.[hf,mutants]' hypothesis pytest pytest-timeout pytest-xdist
    python scripts/mutants.py --workers 12 --out bench/results/mutants.json
    python scripts/mutants.py --workers 12 --out build/again.json --again bench/results/mutants.json

Operators are cosmic-ray's. `--count` places are drawn by `--seed` from all places of pagedweight/runtime that an
operator fits, each place at most once; a place in an annotation, which nothing evaluates, is none. Each mutant meets
those tests of tests/runtime, tests/fuzz and tests/test_policy.py that reach its line, quickest first, until one fails.
Taking far longer than the tests do unchanged counts as a failure. `--again` takes the places of a record instead, found
by their text, also after the files have changed. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mutants_places import Mutant, draw, find_again
from mutants_run import SUITE, Trial, reach, run_trials

ROOT = Path(__file__).parents[1]
KILLED = ("killed", "timeout")


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    verdicts = Counter(record["verdict"] for record in records)
    killed = sum(verdicts[verdict] for verdict in KILLED)
    return {
        "mutants": len(records),
        **dict(sorted(verdicts.items())),
        "killed_share": round(killed / max(1, len(records)), 4),
    }


def write(path: Path, options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    record = {
        "command": f"python scripts/mutants.py --seed {options.seed} --count {options.count}",
        "suite": SUITE,
        "python": sys.version.split()[0],
        "summary": summary(records),
        "mutants": sorted(records, key=lambda one: (one["file"], one["line"], one["operator"])),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def earlier(path: Path, wanted: list[Mutant]) -> list[dict[str, Any]]:
    """Verdicts of an earlier piece of the same run."""
    if not path.exists():
        return []
    keys = {mutant.key for mutant in wanted}
    records = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    return [record for record in records if Mutant.of(record).key in keys]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=3600, help="start no mutant after so long")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants", help="for copies of the tree")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file, written as verdicts come")
    parser.add_argument("--again", type=Path, help="a record whose places are tried again")
    return parser.parse_args()


def main() -> int:
    options, began = parse(), time.monotonic()
    again = json.loads(options.again.read_text(encoding="utf-8")) if options.again else None
    mutants, gone = find_again(ROOT, again["mutants"]) if again else (draw(ROOT, options.count, options.seed), [])
    records = earlier(options.out, mutants)
    done = {Mutant.of(record).key for record in records}
    left = [mutant for mutant in mutants if mutant.key not in done]
    tests = reach(ROOT, options.work, options.workers)
    trials = [Trial(mutant, tests.of(mutant)) for mutant in left]
    print(f"{len(mutants)} mutants, {len(gone)} no longer there, {len(left)} to try", flush=True)
    for verdict in run_trials(ROOT, options.work, trials, options.workers, began + options.seconds):
        records.append(verdict)
        write(options.out, options, records)
        print(f"{verdict['verdict']:9} {verdict['file']}:{verdict['line']} {verdict['after'].strip()}", flush=True)
    print(json.dumps(summary(records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
