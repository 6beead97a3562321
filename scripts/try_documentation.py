"""Every documented command, as a new user types it: a fresh clone, a fresh virtual environment, times.

    python scripts/try_documentation.py WORK [--skip-tests] [--out bench/results/documentation.json]

The README's two commands come first, then the commands of docs/, page by page, each page in a folder where the names
that it uses stand for small models and texts. A comment before a code block can say why it is treated otherwise:

    <!-- run in a fresh environment alone: REASON -->   here, but not by tests/test_documentation.py
    <!-- runs until it is stopped -->                   started here, and ended with its page
    <!-- not run: REASON -->                            by neither
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?:^<!-- ([^\n]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HERE_ALONE, SERVER, NEVER = "run in a fresh environment alone: ", "runs until it is stopped", "not run: "
SHELL = ("bash", "sh")
START_SECONDS = 180


class Block(NamedTuple):
    """A fenced block of a page. mark: what the comment before it says, or empty."""

    page: str
    line: int
    language: str
    text: str
    mark: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page.name, text.count("\n", 0, match.start()) + 1, match[2], match[3], match[1] or "")
        for match in FENCE.finditer(text)
    ]


def commands(text: str) -> list[str]:
    """The lines of a shell block, continued ones joined."""
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def documented() -> Iterator[Block]:
    """Shell blocks of docs/, and those in Python that only this script runs; the quickstart comes first."""
    for page in sorted((ROOT / "docs").glob("*.md"), key=lambda page: (page.name != "quickstart.md", page.name)):
        for block in blocks(page):
            if block.language in SHELL or block.mark.startswith(HERE_ALONE):
                yield block


def prepare(folder: Path, python: str) -> None:
    """The names that pages use: small random models with the tokenizer that ships, and small texts."""
    folder.mkdir(parents=True)
    making = ROOT / "scripts" / "documentation_models.py"
    subprocess.run([python, str(making), str(folder)], check=True, cwd=ROOT)


class Tried(NamedTuple):
    """One command. seconds: None for a server, which ran until its page was done."""

    page: str
    command: str
    status: int
    seconds: float | None


class Shell:
    """Runs commands in a folder with an environment's programs first, and keeps what came of them."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self._folder = folder
        path = f"{environment / 'bin'}:{os.environ['PATH']}"
        self._variables = {**os.environ, "PATH": path, "HOME": str(folder)}  # not the user's own settings
        self._servers: list[subprocess.Popen] = []

    def run(self, page: str, command: str) -> Tried:
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-euc", command], cwd=self._folder, env=self._variables, stdin=subprocess.DEVNULL
        )
        return Tried(page, command, done.returncode, round(time.monotonic() - began, 1))

    def start(self, page: str, command: str) -> Tried:
        """Start a server and wait until it answers."""
        server = subprocess.Popen(
            ["bash", "-euc", f"exec {command}"], cwd=self._folder, env=self._variables, stdin=subprocess.DEVNULL
        )
        self._servers.append(server)
        status = 1
        for _ in range(START_SECONDS):
            time.sleep(1)
            if server.poll() is not None:
                status = server.returncode
                break
            try:
                urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=5)
            except (urllib.error.URLError, OSError):
                continue
            status = 0
            break
        return Tried(page, command, status, None)

    def end(self) -> list[int]:
        """Interrupt the servers; their exit codes."""
        for server in self._servers:
            server.send_signal(signal.SIGINT)
        return [server.wait(timeout=60) for server in self._servers]


def try_page(page: str, found: list[Block], folder: Path, environment: Path) -> Iterator[Tried]:
    prepare(folder, str(environment / "bin" / "python"))
    shell = Shell(folder, environment)
    try:
        for block in found:
            if block.mark.startswith(NEVER) or "-m venv" in block.text:
                continue
            if block.mark == SERVER:
                yield shell.start(page, commands(block.text)[0])
                continue
            if block.language == "python":
                (folder / f"line_{block.line}.py").write_text(block.text, encoding="utf-8")
                yield shell.run(page, f"python line_{block.line}.py")
                continue
            for command in commands(block.text):
                yield shell.run(page, command)
    finally:
        shell.end()


def readme(clone: Path, *, skip_tests: bool) -> Iterator[Tried]:
    """The README's two commands, verbatim, and what the pages need beyond the first."""
    demo, tests = (block.text.strip() for block in blocks(ROOT / "README.md") if block.language == "bash")
    shell = Shell(clone, clone / ".venv")
    yield shell.run("README.md", demo)
    if not skip_tests:
        yield shell.run("README.md", tests)
    install = next(b.text.strip() for b in blocks(ROOT / "docs" / "quickstart.md") if "-m venv" in b.text)
    yield shell.run("quickstart.md", install)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder that does not exist yet")
    parser.add_argument("--skip-tests", action="store_true", help="leave the README's second command out")
    parser.add_argument("--out", type=Path, help="JSON file for the times")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True)
    clone = work / "pagedweight"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    tried = list(_reported(readme(clone, skip_tests=options.skip_tests)))
    found: dict[str, list[Block]] = {}
    for block in documented():
        found.setdefault(block.page, []).append(block)
    for page, own in found.items():
        tried += _reported(try_page(page, own, work / page.removesuffix(".md"), clone / ".venv"))
    failed = [one for one in tried if one.status]
    if options.out:
        _write(options.out, tried)
    shutil.rmtree(work)
    print(f"{len(tried)} commands tried, {len(failed)} failed")
    sys.exit(bool(failed))


def _reported(tried: Iterator[Tried]) -> Iterator[Tried]:
    for one in tried:
        took = "a server" if one.seconds is None else f"{one.seconds:.1f} s"
        print(f"\n{'failed' if one.status else 'ok':>6} {took:>9}  {one.page}: {one.command}", flush=True)
        yield one


def _write(path: Path, tried: list[Tried]) -> None:
    result: dict[str, Any] = {
        "command": f"python scripts/try_documentation.py WORK --out {path}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[1]:.1f} at the end",
        "python": platform.python_version(),
        "commands": [one._asdict() for one in tried],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
