"""Fuzz the whole runtime for as many steps as one likes, in pieces that may be gone on with.

    python scripts/fuzz_runtime.py --steps 100000 --seconds 420 --out bench/results/fuzz-runtime.json
    python scripts/fuzz_runtime.py --seed 1234 --steps 1 --shrink   # again what failed

A seed makes the same programs on every machine with the same version of hypothesis. When one fails, the program and
the command that runs it again are printed; when the time of a piece is over, the command for the next piece. A record
says of every piece which seeds it ran, how many steps they took and whether one failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.fuzz_record import add_piece
from tests.fuzz.runtime_machine import RuntimeMachine

EXAMPLES, STEPS = 20, 50  # of one seed


def run_seed(number: int, *, shrink: bool) -> int:
    """Rules and forwards taken; raises what a program has found."""
    taken = 0

    class Counted(RuntimeMachine):
        @invariant()
        def one_more(self) -> None:
            nonlocal taken
            taken += 1

        def forward_of(self, *arguments: object) -> None:
            nonlocal taken
            taken += 1
            super().forward_of(*arguments)

    options = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(seed(number)(Counted), settings=options)
    return taken


@contextmanager
def told(number: int) -> Iterator[None]:
    """A seed that fails is named with the command that runs it again."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            print(f"seed {number} failed; again: python scripts/fuzz_runtime.py --seed {number} --steps 1", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=420, help="a piece ends after so long")
    parser.add_argument("--shrink", action="store_true", help="look for the shortest program that fails; takes minutes")
    parser.add_argument("--out", type=Path, help="a record to which this piece is added")
    options = parser.parse_args()
    began, taken, number, finding = time.monotonic(), 0, options.seed, 1

    def spent() -> float:
        return time.monotonic() - began

    try:
        while taken < options.steps and spent() < options.seconds:
            with told(number):
                taken += run_seed(number, shrink=options.shrink)
            number += 1
            print(f"seed {number - 1}: {taken} steps in {spent():.0f} s", flush=True)
        finding = 0
    except KeyboardInterrupt:
        finding = 0
        raise
    finally:
        if options.out is not None:
            seeds = {"first_seed": options.seed, "seeds": number - options.seed}
            piece = {**seeds, "steps": taken, "seconds": round(spent(), 1), "findings": finding}
            add_piece(options.out, "python scripts/fuzz_runtime.py", piece)
    if taken < options.steps:
        print(f"go on with: python scripts/fuzz_runtime.py --seed {number} --steps {options.steps - taken}")
    print(f"{taken} steps, seeds {options.seed} to {number - 1}, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
