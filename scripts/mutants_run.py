"""Runs the tests that reach a mutant's line on a copy of the tree, in a fork of a process that has torch ready."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from coverage import CoverageData
from mutants_places import FOLDER, Mutant

SUITE = ["tests/runtime", "tests/fuzz", "tests/test_policy.py"]
COPIED = ("pagedweight", "tests", "bench", "scripts")
READY = ("torch", "numpy", "scipy.optimize", "hypothesis.stateful", "pytest", "safetensors.torch")
MORE_MEMORY_BYTES = 8 << 30  # that a mutant may ask for beyond what is there when it starts
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Trial(NamedTuple):
    mutant: Mutant
    tests: dict[str, float]  # seconds of each, unchanged


class Reach(NamedTuple):
    """Which tests reach a line (lines: file -> line -> tests), and how long each takes."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]

    def of(self, mutant: Mutant) -> dict[str, float]:
        """Tests that reach the mutant's statement; where only an import does, all that reach its file."""
        lines = self.lines.get(mutant.file, {})
        reached = {test for line in range(mutant.first_line, mutant.line + 1) for test in lines.get(str(line), ())}
        if reached == {""}:
            reached = {test for tests in lines.values() for test in tests}
        times = {test: self.seconds.get(test, 0.0) for test in reached if test}
        return dict(sorted(times.items(), key=lambda pair: (pair[1], pair[0])))


def reach(root: Path, work: Path, workers: int) -> Reach:
    """Read from one run of the unchanged suite, which must pass, under coverage; kept as long as no file changes."""
    kept, stamp = work / "reach.json", _stamp(root)
    if kept.exists() and (held := json.loads(kept.read_text(encoding="utf-8")))["stamp"] == stamp:
        return Reach(held["lines"], held["seconds"])
    work.mkdir(parents=True, exist_ok=True)
    tree = _copy(root, work / "tree-reach")
    data, times = work / "coverage", work / "times.xml"
    options = [
        "-q",
        "-n",
        str(workers),
        "-p",
        "no:cacheprovider",
        f"--cov={FOLDER}",
        "--cov-context=test",
        "--cov-report=",
    ]
    environment = os.environ | ENVIRONMENT | {"COVERAGE_FILE": str(data), "COVERAGE_CORE": "ctrace"}
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={times}", *SUITE]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    found = Reach(_lines(data, tree), _seconds(times))
    kept.write_text(json.dumps({"stamp": stamp, **found._asdict()}), encoding="utf-8")
    return found


def _stamp(root: Path) -> str:
    folders = (FOLDER, *SUITE)
    files = sorted(
        path for folder in folders for path in [*(root / folder).rglob("*.py"), root / folder] if path.is_file()
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _copy(root: Path, tree: Path) -> Path:
    shutil.rmtree(tree, ignore_errors=True)
    for part in COPIED:
        shutil.copytree(root / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tree)
    return tree


def _lines(data: Path, tree: Path) -> dict[str, dict[str, list[str]]]:
    covered = CoverageData(str(data))
    covered.read()
    return {
        Path(path).relative_to(tree).as_posix(): {
            str(line): sorted({context.partition("|")[0] for context in contexts})
            for line, contexts in covered.contexts_by_lineno(path).items()
        }
        for path in covered.measured_files()
        if Path(path).is_relative_to(tree / FOLDER)
    }


def _seconds(times: Path) -> dict[str, float]:
    """Of each test by the name that pytest takes; a class comes as the last part of the module's name."""
    seconds = {}
    for case in ElementTree.parse(times).iter("testcase"):
        parts = case.get("classname", "").split(".")
        module = next(i for i, part in enumerate(parts) if part.startswith("test_")) + 1
        name = "::".join(["/".join(parts[:module]) + ".py", *parts[module:], case.get("name", "")])
        seconds[name] = float(case.get("time", 0))
    return seconds


def run_trials(root: Path, work: Path, trials: list[Trial], workers: int, end: float) -> Iterator[dict[str, Any]]:
    """The verdict of each trial as it comes; none is started after `end` (time.monotonic)."""
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = True
    for name in READY:
        importlib.import_module(name)
    gc.freeze()
    free = [_copy(root, work / f"tree-{number}") for number in range(workers)]
    waiting, running = list(trials[::-1]), {}
    while running or (waiting and time.monotonic() < end):
        while free and waiting and time.monotonic() < end:
            trial, tree = waiting.pop(), free.pop()
            if not trial.tests:
                free.append(tree)
                yield _record(trial, "survived", 0.0, "no test reaches it")
                continue
            running[_start(trial, root, tree)] = trial, tree, time.monotonic()
        time.sleep(0.02)
        for process, (trial, tree, began) in list(running.items()):
            spent = time.monotonic() - began
            verdict = _verdict(process, spent > _limit(trial))
            if verdict is not None:
                shutil.copy(root / trial.mutant.file, tree / trial.mutant.file)
                del running[process]
                free.append(tree)
                yield _record(trial, verdict, spent, _failed(tree))


def _limit(trial: Trial) -> float:
    return 20 + 5 * sum(trial.tests.values())


def _start(trial: Trial, root: Path, tree: Path) -> int:
    """The id of a process that runs the trial's tests on the changed tree and ends with pytest's exit code."""
    (tree / trial.mutant.file).write_text(trial.mutant.source(root), encoding="utf-8")
    process = os.fork()
    if process:
        return process
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    code = 1
    try:
        code = pytest.main(["-xq", "--tb=line", "-p", "no:cacheprovider", "-p", "pytest_timeout", *trial.tests])
    finally:
        os._exit(int(code))


def _verdict(process: int, late: bool) -> str | None:
    """None while the process runs."""
    ended, status = os.waitpid(process, os.WNOHANG)
    if ended:
        return "survived" if status == 0 else "killed"
    if not late:
        return None
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "timeout"


def _failed(tree: Path) -> str:
    """The test that failed, or the last thing that was said."""
    lines = (tree / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (named or lines[-1:] or ["nothing was said"])[0]


def _record(trial: Trial, verdict: str, seconds: float, said: str) -> dict[str, Any]:
    by = {} if verdict == "survived" and trial.tests else {"by": said}
    return {**trial.mutant._asdict(), "verdict": verdict, **by, "tests": len(trial.tests), "seconds": round(seconds, 1)}
