"""On a terminal a long step shows how much is done, the time taken and the time left; elsewhere nothing is drawn."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the hf extra")
pytest.importorskip("plotly", reason="needs the plots extra")

from pagedweight.cli.dry_run import dry_run
from pagedweight.cli.main import app
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.planner_trace import TraceWriter

ROOT = Path(__file__).parents[2]
RUNNER = CliRunner()
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}
COLOURS = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
STEPS = {
    # Of calibrate: test_quantize.py, on a model that takes less time.
    "quantize models/Qwen1.5-MoE-A2.7B new --device cpu": ["layer 0"],
    "convert qwen-paged converted --codebook 6=lut16": ["convert"],
    "inspect qwen-paged --verify": ["checksums"],
    "replay run.jsonl qwen-paged": ["reading"],
    "report run.jsonl": ["reading"],
    "bench qwen-paged --device cpu --steps 1 --prompt 4": ["checksums", "width, batch"],
    "eval qwen-paged --task t=c4.jsonl --count 2 --length 32 --budget 3 --device cpu": ["reference", "evaluate"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models and texts under the documentation's names, and a trace of one step."""
    made = tmp_path_factory.mktemp("bars")
    spec = importlib.util.spec_from_file_location("documentation_models", ROOT / "scripts" / "documentation_models.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.make(made)
    planned = dry_run(made / "qwen-paged", 1, None, RuntimeConfig())
    writer = TraceWriter.to(made / "run.jsonl", planned.table, planned.policy)
    writer.lowered(planned.table, planned.observation, planned.plan)
    writer.close()
    return made


@pytest.mark.parametrize("line", STEPS)
def test_a_long_step_has_a_bar(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = RUNNER.invoke(app, line.split(), env=TERMINAL)
    assert done.exit_code in (0, 1), done.output  # the trace's only step is of another gauge: replay may say no
    drawn = COLOURS.sub("", done.stderr)
    for step in STEPS[line]:
        assert re.search(rf"{step} .* \d+/\d+ \d:\d\d:\d\d \d:\d\d:\d\d", drawn), drawn


def test_no_bar_is_drawn_where_nobody_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = RUNNER.invoke(app, ["inspect", "qwen-paged", "--verify"])
    assert (done.exit_code, done.stderr) == (0, "")
