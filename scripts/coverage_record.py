"""Reduce coverage's JSON report to lines and covered lines by file.

    python -m pytest -n 2 --cov --cov-report=json:build/coverage.json
    python scripts/coverage_record.py build/coverage.json --out bench/results/coverage.json

vLLM's tests have an environment of their own; there `-m vllm tests/integrations/vllm --cov --cov-append` adds theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

COMMAND = "python -m pytest --cov --cov-report=json:build/coverage.json"


def record(report: dict[str, Any]) -> dict[str, Any]:
    files = {}
    for path, seen in sorted(report["files"].items()):
        summary = seen["summary"]
        name = path[path.index("pagedweight/") :]
        files[name] = {"lines": summary["num_statements"], "covered": summary["covered_lines"]}
    return {
        "command": COMMAND,
        "python": sys.version.split()[0],
        "coverage": report["meta"]["version"],
        "total": _sum(files),
        "parts": {
            part: _sum({n: f for n, f in files.items() if _part(n) == part}) for part in sorted(set(map(_part, files)))
        },
        "files": files,
    }


def _part(name: str) -> str:
    """The folder below pagedweight/, deepest first; files beside it are "pagedweight"."""
    return str(Path(name).parent)


def _sum(files: dict[str, dict[str, int]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for seen in files.values():
        counts.update(seen)
    return {**counts, "share": round(counts["covered"] / counts["lines"], 4) if counts["lines"] else 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    made = record(json.loads(options.report.read_text(encoding="utf-8")))
    options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(made["total"])


if __name__ == "__main__":
    main()
