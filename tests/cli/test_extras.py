"""A command whose packages are missing leaves with one sentence that says what to install; others do not need them."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedweight.cli.common import EXTRA_MODULES
from pagedweight.cli.main import app

ROOT = Path(__file__).parents[2]
COMMANDS = {
    ("bench", "model"): ("hf",),
    ("quantize", "model", "out"): ("hf",),
    ("calibrate", "model"): ("hf",),
    ("eval", "model"): ("hf",),
    ("eval", "model", "--harness", "arc_easy"): ("hf", "eval"),
    ("demo",): ("hf", "plots"),
    ("report", "run"): ("plots",),
    ("inspect", "model", "--picture", "out.png"): ("plots",),
    ("top",): ("serve",),
    ("serve", "model"): ("serve",),
    ("serve", "model", "--engine", "vllm"): ("vllm",),
}
NEEDS = [
    (command, extra, module)
    for command, extras in COMMANDS.items()
    for extra in extras
    for module in EXTRA_MODULES[extra]
]
# In a process of its own: here the packages are imported already.
WITHOUT_ANY = """
import sys
for name in {names}:
    sys.modules[name] = None
from typer.testing import CliRunner
from pagedweight.cli.main import app
for command in {commands}:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (command, done.exit_code, done.output, done.exception)
"""
# The same process goes on.
IN_PYTHON = """
import pagedweight
pagedweight.patch, pagedweight.save, pagedweight.Policy
assert "patch" in dir(pagedweight) and "load" not in dir(pagedweight)
asked = [lambda name=name: getattr(pagedweight, name) for name in
         ("PagedWeightConfig", "calibrate", "from_pretrained", "load")]
for ask in (*asked, lambda: pagedweight.quantize("a-folder", "out")):
    try:
        ask()
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("command", "extra", "module"), NEEDS, ids=lambda part: " ".join(part) if isinstance(part, tuple) else part
)
def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...], extra: str, module: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    done = CliRunner().invoke(app, list(command))
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert module in sentence
    assert "not installed; run: pip install 'pagedweight[" in sentence
    assert extra in sentence.rpartition("[")[2]
    assert not list(tmp_path.iterdir())


def test_without_any_extra_what_needs_none_runs_and_python_is_told_of_transformers_too() -> None:
    names = sorted(
        {*chain.from_iterable(EXTRA_MODULES.values()), "accelerate", "peft", "huggingface_hub", "tokenizers"}
    )
    folder = str(ROOT / "pagedweight" / "assets" / "tiny-qwen2-moe")
    helped = [[name, "--help"] for name in sorted({command[0] for command in COMMANDS})]
    commands = [["--help"], *helped, ["doctor"], ["inspect", folder]]
    code = WITHOUT_ANY.format(names=names, commands=commands) + IN_PYTHON
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 5
    assert all("needs transformers, not installed; run: pip install 'pagedweight[hf]'" in line for line in said)
