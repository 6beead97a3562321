"""docs/compatibility.md states the bounds that pyproject.toml has, and what the record of other GPUs holds."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\w+) \| ([\d.]+) \| (.+) \|$", PAGE, re.M)


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


def test_the_table_of_gpus_has_what_the_record_has() -> None:
    record = json.loads((ROOT / "bench/results/other-gpus.json").read_text(encoding="utf-8"))
    for device, granted_bytes in record["granted_bytes"].items():
        rows = [row for row in record["rows"] if row["device"] == device]
        assert len(rows) == 6
        assert all(row["fits"] for row in rows)
        few, many = (
            max(max(row["shared_bytes"].values()) for row in rows if (row["tokens"] > 64) is long)
            for long in (False, True)
        )
        assert f"| {device} | {granted_bytes / 1024:g} | {few / 1024:g} | {many / 1024:g} |\n" in PAGE


def test_rows_of_two_releases_of_triton_do_not_stand_in_one_record(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="compiles kernels")
    script = importlib.import_module("scripts.other_gpus")
    record = tmp_path / "other-gpus.json"
    rows = [{"device": device.name} for device in script.DEVICES]
    script.write(record, rows)
    script.write(record, rows[:1])
    old = json.loads(record.read_text(encoding="utf-8"))
    record.write_text(json.dumps(old | {"triton": "3.5.0"}), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"rows of Triton 3\.5\.0"):
        script.write(record, rows[:1])
    script.write(record, rows)
    assert json.loads(record.read_text(encoding="utf-8")) == old
