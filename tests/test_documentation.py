"""Every code block of the documentation runs, in a folder of small models, or says why not; and the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the hf extra")

import pagedweight
from pagedweight.cli.main import app

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


TRYING = script("try_documentation")
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if TRYING.blocks(page)]
MARKS = (TRYING.HERE_ALONE, TRYING.SERVER, TRYING.NEVER)
RUN = ("python", *TRYING.SHELL)
# What a small model on a CPU stands in for.
SMALLER = ((r'device_map="cuda"', 'device_map="cpu"'), (r"max_new_tokens=[\d_]+", "max_new_tokens=3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("documentation")
    script("documentation_models").make(made)
    return made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_runs_or_says_why_not(
    page: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documentation"}
    for block in TRYING.blocks(page):
        if block.mark.startswith(MARKS) or block.language not in RUN:
            continue
        if block.language == "python":
            text = block.text
            for large, small in SMALLER:
                text = re.sub(large, small, text)
            exec(compile("\n" * block.line + text, str(page), "exec"), names)
            continue
        for command in TRYING.commands(block.text):
            program, *arguments = shlex.split(command)
            assert program == "pagedweight", f"{page.name}: say why {command!r} is not run by tests"
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, f"{page.name}: {command}\n{done.output}"


def test_marks_are_of_a_kind_that_something_reads() -> None:
    for page in PAGES:
        for block in TRYING.blocks(page):
            assert not block.mark or block.mark.startswith(MARKS), f"{page.name}:{block.line}: {block.mark}"


def test_a_block_with_a_mark_is_found_with_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marked = "<!-- not run: of no use -->\n```bash\na \\\n  b\nc\n```\n"
    page.write_text(f"# A\n\n{marked}\n<!-- a note -->\n\n```python\nx = 1\n```\n")
    first, second = TRYING.blocks(page)
    assert (first.mark, first.language, TRYING.commands(first.text)) == ("not run: of no use", "bash", ["a    b", "c"])
    assert (second.mark, second.text) == ("", "x = 1\n")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the docs extra")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "budget_bytes" in api
    assert "fonts.googleapis" not in api
    assert (tmp_path / "site" / "repository" / "bench" / "LOG.html").is_file()


def test_every_public_name_is_on_the_page_of_the_interface() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith(":::")}
    assert set(pagedweight.__all__) <= shown


def test_every_command_and_its_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert len(names) >= 13
    for name in names:
        assert re.search(rf"`{name}\b", page), name
