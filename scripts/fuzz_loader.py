"""Damage checkpoints, policies, traces and dense folders as long as one likes, in pieces that may be gone on with.

    python scripts/fuzz_loader.py --cases 100000 --seconds 420 --out bench/results/fuzz-loader.json
    python scripts/fuzz_loader.py --seed 1234 --cases 1 --show   # again what failed

Each seed damages one set of files in one to three ways and reads it: what comes out is what was written, or one
sentence in an error of the library's own, in time and in memory that the files justify. The process may
allocate little more than it has at the start, so a huge allocation fails.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.fuzz_record import add_piece
from tests.fuzz.loaders import try_seed, whole_folders

ALLOWED_BYTES = 2**29  # beyond what the process has at its start
LONGEST_SECONDS = 60


def limit_memory() -> None:
    """From now on an allocation much beyond what is there fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ALLOWED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"not read within {LONGEST_SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=420, help="a piece ends after so long")
    parser.add_argument("--show", action="store_true", help="print every case")
    parser.add_argument("--out", type=Path, help="a record to which this piece is added")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, too_long)
    outcomes, began, failed = Counter(), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        whole = whole_folders(Path(folder) / "whole")
        limit_memory()
        for seed in range(options.seed, options.seed + options.cases):
            signal.alarm(LONGEST_SECONDS)
            try:
                told = try_seed(seed, whole, Path(folder) / "scratch")
            except AssertionError as error:
                failed += 1
                print(f"{error}\nagain: python scripts/fuzz_loader.py --seed {seed} --cases 1", flush=True)
                told = "failed"
            signal.alarm(0)
            if options.show:
                print(seed, told, flush=True)
            outcomes[told.rpartition(" -> ")[2] == "read"] += 1
            if time.monotonic() - began > options.seconds:
                left = options.seed + options.cases - seed - 1
                print(f"go on with: python scripts/fuzz_loader.py --seed {seed + 1} --cases {left}")
                break
    piece = {
        "first_seed": options.seed,
        "cases": outcomes.total(),
        "read": outcomes[True],
        "refused": outcomes[False],
        "seconds": round(time.monotonic() - began, 1),
        "findings": failed,
    }
    print(", ".join(f"{count} {name}" for name, count in piece.items()))
    if options.out is not None:
        add_piece(options.out, "python scripts/fuzz_loader.py", piece)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
