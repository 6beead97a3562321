"""Completion as shells ask for it, and as `--install-completion` puts it into a home folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedweight.cli.main import app

ROOT = Path(__file__).parents[2]
RUNNER = CliRunner()
# What a new interactive shell has registered, and offers after "pagedweight ins" and the tab key.
ASKING = {
    "bash": "complete -p pagedweight; COMP_WORDS=(pagedweight ins); COMP_CWORD=1; _pagedweight_completion pagedweight; "
    'echo "${COMPREPLY[@]}"',
    "zsh": "${_comps[pagedweight]}; print ${_comps[pagedweight]}; function _arguments { print -r -- $* }; "
    "words=(pagedweight ins); CURRENT=2; ${_comps[pagedweight]}",
}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_the_commands(shell: str) -> None:
    typed = {"_PAGEDWEIGHT_COMPLETE": f"complete_{shell}", "COMP_WORDS": "pagedweight ", "COMP_CWORD": "1"}
    typed |= {"_TYPER_COMPLETE_ARGS": "pagedweight ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = RUNNER.invoke(app, [], env=typed, prog_name="pagedweight")
    assert "inspect" in result.stdout
    assert "doctor" in result.stdout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder of nobody's, and in it a program as pip would install it."""
    program = tmp_path / "bin" / "pagedweight"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom pagedweight.cli.main import main\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def typed(shell: str, home: Path, line: str, *options: str) -> subprocess.CompletedProcess:
    """A line typed into a shell of that home folder."""
    path = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    command = [shell, *options, "-c", f"{line}; true"]  # by itself a command would take the shell's place
    return subprocess.run(
        command, env={**path, "HOME": str(home)}, cwd=home, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("shell", sorted(ASKING))
def test_completion_is_installed_into_a_home_folder(shell: str, home: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (home / f".{shell}rc").write_text("mine=kept\n", encoding="utf-8")
    installed = typed(shell, home, "pagedweight --install-completion")
    assert installed.returncode == 0, installed.stderr
    assert f"{shell} completion installed" in installed.stdout
    answered = typed(shell, home, f"echo $mine; {ASKING[shell]}", "-i")
    assert "kept" in answered.stdout, answered.stderr  # what was in the settings is there still
    assert "_pagedweight_completion" in answered.stdout, answered.stderr
    offered = answered.stdout.splitlines()[-1]
    assert "inspect" in offered
    assert "quantize" not in offered  # only what begins as typed
