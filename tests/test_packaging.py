"""What is built of the project, and the files around it that people and tools read."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import pagedweight

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILES = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
}
yaml = pytest.importorskip("yaml", reason="needs the dev extra")


def test_sdist_and_wheel_have_what_they_need_and_nothing_else(tmp_path: Path) -> None:
    """The wheel is made from the sdist, so that this can be built from. One test, since building takes seconds."""
    pytest.importorskip("build", reason="needs the dev extra")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {*FILES, "pagedweight/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} - {""} == {*FILES, "pagedweight", "pagedweight.egg-info"}
    check_wheel(next(tmp_path.glob("*.whl")))


def check_wheel(path: Path) -> None:
    """The code, the model that ships, its licence, and metadata that an index would take; no tests."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        written = wheel.read(f"pagedweight-{pagedweight.__version__}.dist-info/METADATA")
    shipped = (path for path in (ROOT / "pagedweight").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert not {f"pagedweight/{path.relative_to(ROOT / 'pagedweight')}" for path in shipped} - names
    assert "pagedweight/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith(("pagedweight/", "pagedweight-"))]
    metadata = Metadata.from_email(written, validate=True)
    assert {"hf", "vllm", "plots", "serve", "dev"} <= set(metadata.provides_extra)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_extra_that_a_command_asks_for_is_there() -> None:
    from pagedweight.cli.common import EXTRA_MODULES

    assert set(EXTRA_MODULES) <= set(PROJECT["optional-dependencies"])


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == pagedweight.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["references"][0]["title"].startswith("PagedWeight")


def test_the_issue_template_asks_for_the_doctors_answer() -> None:
    template = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8"))
    asked = next(field for field in template["body"] if field["id"] == "doctor")
    assert "pagedweight doctor" in asked["attributes"]["description"]
    assert asked["validations"]["required"]


def test_hooks_before_a_commit_run_ruff_of_a_version_the_project_takes() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    ruff = next(repo for repo in hooks if "ruff" in repo["repo"])
    assert {hook["id"] for hook in ruff["hooks"]} == {"ruff-check", "ruff-format"}
    least = next(r for r in PROJECT["optional-dependencies"]["dev"] if r.startswith("ruff")).partition(">=")[2]
    assert ruff["rev"].startswith(f"v{least}")
