"""`pagedweight inspect`: its figures are those of the files and the policy, and its pictures are pictures."""

from __future__ import annotations

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import pagedweight
from pagedweight.checkpoint import FOLDER, Checkpoint
from pagedweight.cli.heat import SHADES, cells, legend
from pagedweight.cli.inspect import show
from pagedweight.cli.inspect_facts import COLD_SHARE, facts_of
from pagedweight.cli.main import app
from pagedweight.policy import Policy

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"
RUNNER = CliRunner()


def test_a_folder_is_named_as_it_is_called(tmp_path: Path) -> None:
    """Brackets are no markup."""
    folder = tmp_path / "tiny[v2]"
    shutil.copytree(TINY, folder)
    done = RUNNER.invoke(app, ["inspect", str(folder)])
    assert done.output.startswith(f"{folder}: 4 MoE layers, ")


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """The model that ships under a policy in which expert 3 of every layer is nearly unused."""
    folder = tmp_path / "uneven"
    shutil.copytree(TINY, folder)
    policy = Policy.load(folder / FOLDER)
    mass = policy.m_cal.copy()
    mass[policy.blocks[:, 1] == 3] = 0.01 / 16
    policy.replaced(m_cal=mass).save(folder / FOLDER)
    return folder


def test_bytes_are_those_of_the_files() -> None:
    document = json.loads(RUNNER.invoke(app, ["inspect", str(TINY), "--json"]).stdout)
    layout = Checkpoint.open(TINY).layout
    assert document["linear_blocks"] == layout.rows
    parent = document["widths"][str(layout.parent_width)]
    tables = sum(width["tables_bytes"] for width in document["widths"].values())
    shards = [path.read_bytes() for path in (TINY / FOLDER).glob("pages-*")]
    data = sum(len(shard) - 8 - int.from_bytes(shard[:8], "little") for shard in shards)
    assert parent["planes_bytes"] + tables == data
    resident = [width["resident_bytes"] for width in document["widths"].values()]
    assert resident == sorted(resident)


def test_sensitivity_is_the_policys(uneven: Path) -> None:
    policy, document = (
        Policy.load(uneven / FOLDER),
        json.loads(RUNNER.invoke(app, ["inspect", str(uneven), "--json"]).stdout),
    )
    told = np.array([[layer["sensitivity"][p] for p in ("gate_up", "down")] for layer in document["layers"]])
    by_row = told.transpose(0, 2, 1, 3).reshape(policy.rows, -1)
    assert (by_row == policy.sensitivity).all()
    sums = [width["sensitivity"] for width in document["widths"].values()]
    assert sums == pytest.approx(policy.sensitivity.sum(axis=0))


def test_cold_experts_are_named(uneven: Path) -> None:
    facts = facts_of(uneven)
    assert facts.calibrated
    assert all(layer.cold == (3,) for layer in facts.layers)
    assert all((layer.shares[3] < COLD_SHARE) & np.isclose(layer.shares.sum(), 16) for layer in facts.layers)
    text = RUNNER.invoke(app, ["inspect", str(uneven)]).stdout
    assert text.count("1 cold: 3") == len(facts.layers)
    assert "not calibrated" not in text


def test_a_folder_that_was_only_quantized_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("calibration.json"))
    policy = Policy.load(folder / FOLDER)
    policy.replaced(m_cal=np.full(policy.rows, 1 / 16)).save(folder / FOLDER)
    assert "not calibrated" in RUNNER.invoke(app, ["inspect", str(folder)]).stdout
    assert "not calibrated" not in RUNNER.invoke(app, ["inspect", str(TINY)]).stdout


def test_experts_that_calibration_hardly_reached_are_cold_too(uneven: Path) -> None:
    report = {"cold": {"layers.1.experts.7.gate_up": 3, "layers.1.experts.7.down": 3}}
    (uneven / FOLDER / "calibration.json").write_text(json.dumps(report))
    assert [layer.cold for layer in facts_of(uneven).layers] == [(3,), (3, 7), (3,), (3,)]


@pytest.mark.parametrize("report", ["{", "[]", '{"cold": 5}', '{"cold": [5]}', '{"cold": ["a.b"]}', "[" * 100_000])
def test_a_damaged_report_of_calibration_is_one_sentence(uneven: Path, report: str) -> None:
    (uneven / FOLDER / "calibration.json").write_text(report)
    done = RUNNER.invoke(app, ["inspect", str(uneven)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "calibration.json is damaged" in done.stderr
    assert "calibrate again" in done.stderr


def test_pictures_are_drawn_as_png_and_svg(uneven: Path, tmp_path: Path) -> None:
    png, svg = tmp_path / "map.png", tmp_path / "map.svg"
    done = RUNNER.invoke(app, ["inspect", str(uneven), "--picture", str(png), "--picture", str(svg)])
    assert done.exit_code == 0, done.output
    from matplotlib.image import imread

    pixels = imread(png)
    assert pixels.shape[1] >= 1000
    assert (pixels[:4, :4, :3] == 1).all()  # on white, for dark pages
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_verify_reads_the_pages(uneven: Path) -> None:
    assert RUNNER.invoke(app, ["inspect", str(uneven), "--verify"]).exit_code == 0
    shard = next((uneven / FOLDER).glob("pages-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert RUNNER.invoke(app, ["inspect", str(uneven)]).exit_code == 0
    damaged = RUNNER.invoke(app, ["inspect", str(uneven), "--verify"])
    assert damaged.exit_code == 2
    assert "checksum" in damaged.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["none"], "quantize the model"), ([str(TINY), "--picture", "map.gif"], ".png or .svg")],
)
def test_bad_input_leaves_with_code_2_and_says_what(arguments: list[str], word: str) -> None:
    done = RUNNER.invoke(app, ["inspect", *arguments])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert word in done.stderr


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.integers(50, 200), st.booleans())
def test_every_value_has_a_cell_or_the_largest_of_a_few_does(values: list[float], width: int, colour: bool) -> None:
    console = Console(file=StringIO(), width=width, color_system="truecolor" if colour else None, force_terminal=colour)
    line = cells(values, (min(values), max(values)), console)
    assert 1 <= line.cell_len <= max(8, width - 40)
    hottest = legend((0, 1), console)
    last = hottest.spans[-1].style if colour else hottest.plain.split()[1][-1]
    assert any(span.style == last for span in line.spans) if colour else last in line.plain
    assert not colour or f"on {SHADES[-1]}" == last


def test_a_terminal_with_colours_gets_them(uneven: Path) -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system="truecolor")
    show(facts_of(uneven), console)
    # rich keeps a style's codes as the first console of the process wanted them: 24 bits, or the nearest of 16 colours
    assert re.search(r"\x1b\[(48;2;253;231;37|103)m", console.file.getvalue())
