"""docs/compatibility.md states the bounds that pyproject.toml has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROWS = re.findall(
    r"^\| (\w+) \| ([\d.]+) \| (.+) \|$", (ROOT / "docs/compatibility.md").read_text(encoding="utf-8"), re.M
)


def stated() -> dict[str, str]:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["hf"], *extras["vllm"], f"Python{PROJECT['requires-python']}"]
    return dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in wanted)


@pytest.mark.parametrize(("name", "bound", "tried"), ROWS, ids=[name for name, *_ in ROWS])
def test_a_bound_is_the_projects_and_was_tried(name: str, bound: str, tried: str) -> None:
    assert bound == stated()[name]
    assert any(f"{version}.".startswith(f"{bound}.") for version in re.findall(r"\d+(?:\.\d+)+", tried))


def test_what_decides_whether_it_runs_is_there() -> None:
    assert {"Python", "torch", "triton", "transformers", "vllm"} <= {name for name, *_ in ROWS}
