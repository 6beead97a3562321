"""The runtime's tests on real streams, as a file that says what passed.

The state machine runs with blocking launches and under compute-sanitizer too.

python bench/runtime/gpu_tests.py --out bench/results/h200-runtime-tests.json
python bench/runtime/gpu_tests.py --suite numerics --out bench/results/h200-numerics.json
python bench/runtime/gpu_tests.py --suite float16 --out bench/results/h200-numerics-float16.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

CASES = "tests/e2e/test_open_cases_cuda.py"
MACHINE = ["tests/runtime/test_pager_cuda.py", "-k", "short"]
EXTREMES = "tests/kernels/test_extremes.py"
# What stands before python, and what comes after pytest.
RUNTIME = (
    ([], ["tests/runtime/test_controller_cuda.py", CASES]),
    ([], ["tests/runtime/test_pager_cuda.py"]),
    ([], ["tests/runtime/test_pages.py"]),
    ([], ["tests/runtime/test_transfer.py"]),
    (["env", "CUDA_LAUNCH_BLOCKING=1"], MACHINE),
    (["env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"], [CASES, "-k", "case_76"]),
    (["compute-sanitizer", "--tool", "memcheck"], MACHINE),
)
SMALL = "(weights or bad_rows or 2_31)"


def extremes(dtype: str) -> tuple:
    return ([], [EXTREMES, "-k", f"torch.{dtype} and not products"])


def checked(dtype: str) -> tuple:
    tools = "memcheck", "racecheck"
    return tuple(
        (["compute-sanitizer", "--tool", tool], [EXTREMES, "-k", f"{SMALL} and torch.{dtype}"]) for tool in tools
    )


NUMERICS = (
    extremes("float32"),
    extremes("bfloat16"),
    ([], [EXTREMES, "-k", "products"]),
    ([], ["tests/e2e/test_determinism.py", "tests/e2e/test_concurrency.py"]),
)
# Runs of one stage go side by side, a few at a time; a later stage finds the kernels compiled.
TOGETHER = 4
SUITES = {
    "runtime": (RUNTIME,),
    "numerics": (NUMERICS, (*checked("float32"), *checked("bfloat16"))),
    "float16": ((extremes("float16"),), checked("float16")),
}


def run_tests(under: list[str], arguments: list[str], limit_seconds: float) -> dict:
    """One pytest run: its command, what each test did, and the last lines it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [*under, sys.executable, "-X", "faulthandler", "-m", "pytest", *options, *arguments]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_seconds
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as over:
            output, code = (over.stdout or b"").decode(errors="replace"), None
        return {
            "command": " ".join([*under, "python -m pytest -q -m gpu", *arguments]),
            "exit_code": code,
            "tests": outcomes(report) if report.exists() else [],
            "last_lines": output.splitlines()[-40:],
        }


def outcomes(report: Path) -> list[dict]:
    found = []
    for case in ET.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found.append({"test": case.get("name"), "outcome": outcome, "seconds": float(case.get("time"))})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", choices=SUITES, default="runtime")
    parser.add_argument("--seconds", type=float, default=150, help="limit of each run")
    options = parser.parse_args()
    results = {
        "gpu": torch.cuda.get_device_name(),
        "versions": [torch.__version__, torch.version.cuda, sys.version.split()[0]],
        "command": " ".join(["python", *sys.argv]),
        "runs": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for runs in SUITES[options.suite]:
        with ThreadPoolExecutor(TOGETHER) as together:
            for run in together.map(lambda run: run_tests(*run, options.seconds), runs):
                results["runs"].append(run)
                print(json.dumps(run, indent=1), flush=True)
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(run["exit_code"] != 0 for run in results["runs"]))


if __name__ == "__main__":
    sys.exit(main())
