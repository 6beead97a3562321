"""Fuzz the whole runtime for as many steps as one likes, in pieces that may be gone on with.

    python scripts/fuzz_runtime.py --steps 100000 --seconds 420
    python scripts/fuzz_runtime.py --seed 1234 --steps 1 --shrink   # again what failed

A seed makes the same programs on every machine with the same version of hypothesis. When one fails, the program and
the command that runs it again are printed; when the time of a piece is over, the command for the next piece.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1]))

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=420, help="a piece ends after so long")
    parser.add_argument("--shrink", action="store_true", help="look for the shortest program that fails; takes minutes")
    options = parser.parse_args()
    began, taken, number = time.monotonic(), 0, options.seed
    while taken < options.steps:
        with ExitStack() as on_failure:
            on_failure.callback(
                print, f"failed after {taken} steps; again: python scripts/fuzz_runtime.py --seed {number} --steps 1"
            )
            taken += run_seed(number, shrink=options.shrink)
            on_failure.pop_all()
        number += 1
        spent = time.monotonic() - began
        print(f"seed {number - 1}: {taken} steps in {spent:.0f} s", flush=True)
        if spent > options.seconds and taken < options.steps:
            print(f"go on with: python scripts/fuzz_runtime.py --seed {number} --steps {options.steps - taken}")
            return 0
    print(f"{taken} steps, seeds {options.seed} to {number - 1}, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
