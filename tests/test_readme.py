"""What the README promises: its code runs, its two commands are there, and the names in its tables exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts import readme_results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "LOG.md"])


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_code_block_is_of_a_kind_that_something_runs() -> None:
    assert set(re.findall(r"^```(\w+)$", README, re.MULTILINE)) <= {"python", "bash", "text"}


def test_the_python_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """With a small model in the place of the large one, a budget to match, and the CPU."""
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    from pagedweight.demo.run import CHECKPOINT
    from tests.hf_models import qwen2_moe_q60

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = qwen2_moe_q60(vocab_size=len(tokenizer), num_experts=8)
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    smaller = {
        "models/Qwen1.5-MoE-A2.7B": "small",
        "budget_bytes=10 * 2**30": "budget_bytes=2**20",
        "max_new_tokens=6_000": "max_new_tokens=8",
        'device_map="cuda"': 'device_map="cpu"',
    }
    code = "\n".join(blocks("python"))
    for large, small in smaller.items():
        assert code.count(large) == 1, large
        code = code.replace(large, small)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_the_use_takes_about_ten_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 10


def test_exactly_two_commands_set_it_up() -> None:
    demo, tests = blocks("bash")
    assert demo.endswith("pagedweight demo\n")
    assert "pytest" in tests
    for command in (demo, tests):
        assert command.count("\n") == 1
        assert "-c constraints-cpu.txt" in command
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "readme_command 1" in script
    assert "readme_command 2" in script


def identifiers(path: Path) -> set[str]:
    """Every class, function, field, argument and variable that a file names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("name", "id", "attr", "arg"):
            names |= {value for value in [getattr(node, field, None)] if isinstance(value, str)}
    return names


SYMBOL_ROWS = re.findall(r"^\|.*\| `(\S+\.py)`: (.*) \|$", README, re.MULTILINE)


def test_there_is_a_table_of_paper_symbols() -> None:
    assert len(SYMBOL_ROWS) >= 20
    for equation in range(1, 9):
        assert f"Eq. {equation}" in README


@pytest.mark.parametrize(("file", "cell"), SYMBOL_ROWS, ids=lambda value: value.replace("`", ""))
def test_the_code_that_a_symbol_points_to_exists(file: str, cell: str) -> None:
    there = identifiers(ROOT / "pagedweight" / file)
    for dotted in re.findall(r"`([\w.]+)`", cell):
        assert set(dotted.split(".")) <= there, f"{file} has no {dotted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_results_are_those_of_the_recorded_run() -> None:
    """`python scripts/readme_results.py` brings the README up to date after a new run."""
    assert readme_results.rewritten(README) == README
