"""`pagedweight report`: its series are those of the trace, and a browser shows and moves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import pagedweight
from pagedweight.checkpoint import FOLDER
from pagedweight.cli.dry_run import dry_run
from pagedweight.cli.main import app
from pagedweight.cli.report_run import Run, read_run, thinned
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Queue, plan_raise, plan_step
from pagedweight.runtime.planner_trace import TraceWriter
from tests.browser import browser

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"
RUNNER = CliRunner()
ARENA_BYTES = 12 * 2**20
STEPS = 12


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real planner's steps: a cache that grows by 64 KiB a step and then ends."""
    path = tmp_path_factory.mktemp("trace") / "run <&>.jsonl"
    policy, table = Policy.load(TINY / FOLDER), dry_run(TINY, 1, None, RuntimeConfig()).table
    table = table._replace(busy=np.zeros(policy.rows, dtype=bool), since=np.full(policy.rows, 99))
    writer, queue = TraceWriter.to(path, table, policy, ARENA_BYTES), Queue()
    for step in range(STEPS):
        if step < STEPS - 2:
            seen = Observation(KVState(2, 2**16), 4)
            queue, plan = plan_step(table, seen, policy, queue)
            writer.lowered(table, seen, plan)
        else:
            seen = Observation(KVState(60, 2**16), 4)
            plan = plan_raise(table, seen, policy, 2**21)
            writer.raised(table, seen, 2**21, plan)
        committed = table.committed.copy()
        for move in plan.transitions:
            committed[move.row] = move.to_bits
        table = table._replace(committed=committed, desired=committed)
    writer.close()
    return path


@pytest.fixture(scope="module")
def run(trace: Path) -> Run:
    with trace.open(encoding="utf-8") as lines:
        return read_run(lines)


def test_series_account_for_every_row_and_byte(run: Run) -> None:
    assert len(run.step) == STEPS
    assert (run.rows_at_width.sum(axis=1) == 128).all()
    assert (run.weight_bytes + run.kv_bytes + run.free_bytes == ARENA_BYTES).all()
    assert run.mean_bits == pytest.approx(run.layer_bits.mean(axis=1))
    assert run.mean_bits == pytest.approx(run.rows_at_width @ np.array(run.widths) / 128)


def test_what_a_plan_moves_is_what_the_next_step_sees(run: Run) -> None:
    change = np.diff(run.weight_bytes)
    assert (change == (run.loaded_bytes - run.released_bytes)[:-1]).all()
    assert run.lowered[:-2].all()
    assert not run.lowered[-2:].any()
    assert run.raised[-2:].any()
    assert run.mean_bits[-3] < run.mean_bits[0]


@given(st.integers(1, STEPS + 3))
def test_thinning_keeps_sums_and_the_end(run: Run, points: int) -> None:
    few = thinned(run, points)
    assert len(few.step) == min(points, STEPS)
    for name in ("lowered", "raised", "released_bytes", "loaded_bytes", "damage"):
        assert getattr(few, name).sum() == pytest.approx(getattr(run, name).sum())
    for name in ("step", "mean_bits", "weight_bytes", "kv_bytes"):
        assert getattr(few, name)[-1] == getattr(run, name)[-1]
    assert few.shortfall_bytes.max() == run.shortfall_bytes.max()


def test_a_cache_of_its_own_is_left_out(trace: Path) -> None:
    head, *steps = trace.read_text(encoding="utf-8").splitlines()
    apart = json.dumps({**json.loads(head), "arena_bytes": None})
    assert read_run([apart, *steps]).kv_bytes is None
    from pagedweight.cli.report_page import draw

    names = {curve.name for curve in draw(read_run([apart, *steps])).data}
    assert "expert weights" in names
    assert "KV cache" not in names


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "trace_version"),
        ('{"trace_version": 1}\n', "this release"),
        ("not json\n", "line 1"),
        ("[1]\n", "list"),
        (None, "No such file"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, content: str | None, word: str) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    done = RUNNER.invoke(app, ["report", str(path), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 2
    assert word in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_a_trace_without_a_step_says_so(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "head.jsonl").write_text(trace.read_text(encoding="utf-8").splitlines()[0])
    assert "never near" in RUNNER.invoke(app, ["report", str(tmp_path / "head.jsonl")]).stderr


@pytest.fixture(scope="module")
def shown(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    done = RUNNER.invoke(app, ["report", str(trace), "-o", str(path)])
    assert done.exit_code == 0, done.output
    with browser() as opened:
        opened.get(path.as_uri())
        yield opened


def test_a_browser_draws_every_panel_and_asks_the_network_for_nothing(shown: Chrome, run: Run) -> None:
    assert shown.title == "run <&>.jsonl"
    assert not [line for line in shown.get_log("browser") if line["level"] == "SEVERE"]
    sent = (json.loads(entry["message"])["message"] for entry in shown.get_log("performance"))
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert urls
    assert all(url.startswith(("file:", "data:", "blob:")) for url in urls)
    drawn = "return document.querySelectorAll('#run .subplot.{}').length"
    assert all(shown.execute_script(drawn.format(panel)) == 1 for panel in ("xy", "x2y2", "x3y3", "x4y4"))
    heat = shown.execute_script(
        "return Array.from(run._fullData.find(d => d.type === 'heatmap').z, row => Array.from(row))"
    )
    assert np.array(heat) == pytest.approx(run.layer_bits.T, abs=1e-3)
    assert "planner steps\n12" in shown.find_element("tag name", "dl").text


def test_dragging_zooms_all_panels_and_a_name_hides_its_curve(shown: Chrome) -> None:
    from selenium.webdriver import ActionChains

    panel = shown.find_element("css selector", "#run .nsewdrag[data-subplot='xy']")
    width = panel.rect["width"]
    drag = ActionChains(shown).move_to_element_with_offset(panel, -width / 4, 0).click_and_hold()
    drag.move_by_offset(width / 4, 0).release().perform()
    ranges = shown.execute_script("return ['', '2', '3', '4'].map(n => run._fullLayout['xaxis' + n].range)")
    assert all(low > 1 for low, _ in ranges)
    assert all(high < STEPS - 3 for _, high in ranges)
    legend = shown.find_elements("css selector", "#run .legendtoggle")
    legend[0].click()
    hidden = "return run._fullData.some(d => d.visible === 'legendonly')"
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(shown, 5).until(lambda page: page.execute_script(hidden))


@pytest.mark.parametrize(("scheme", "ink"), [("dark", "#ddd"), ("light", "#222")])
def test_it_reads_in_light_and_dark(shown: Chrome, scheme: str, ink: str) -> None:
    shown.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(shown, 5).until(lambda page: page.execute_script("return run.layout.font.color") == ink)
    paper = shown.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 24, 28)" if scheme == "dark" else "rgb(255, 255, 255)")
