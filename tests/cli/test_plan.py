"""`pagedweight plan` says what the planner would do, `pagedweight replay` whether a trace still comes out the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import pagedweight
from pagedweight.checkpoint import FOLDER, Checkpoint
from pagedweight.cli.dry_run import dry_run
from pagedweight.cli.main import app
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Queue, plan_step
from pagedweight.runtime.planner_trace import TraceWriter

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"
RUNNER = CliRunner()


def told(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["plan", str(TINY), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_dry_run_is_the_planners_plan() -> None:
    document = json.loads(told("--free", "1MiB", "--json"))
    table = dry_run(TINY, 1, None, RuntimeConfig()).table
    seen = Observation(KVState(0, 2**20))
    _, plan = plan_step(table, seen, Policy.load(TINY / FOLDER), Queue())
    assert [move["row"] for move in document["transitions"]] == [move.row for move in plan.transitions]
    assert document["released_bytes"] == plan.released_bytes >= 2**20
    assert document["damage"] == plan.damage
    blocks = list(Checkpoint.open(TINY).layout.blocks())
    assert all(move["block"] == str(blocks[move["row"]]) for move in document["transitions"])
    assert sum(width["before"] for width in document["widths"].values()) == len(blocks)


def test_pins_budgets_and_what_is_missing_are_told() -> None:
    text = told("--free", "4GiB", "--pin", "1.3=5", "--explain", "layers.1.experts.3.gate_up")
    assert "are missing" in text
    assert "the plan takes it to 5 bits" in text
    assert "a pin at 5 bits" in text
    document = json.loads(told("--free", "4GiB", "--most-damage", "0.1", "--json"))
    assert 0.05 < document["damage"] <= 0.1
    document = json.loads(told("--free", "1MiB", "--weights", "6MiB", "--json"))
    assert document["held_bytes"] <= 6 * 2**20
    assert document["widths"]["6"]["before"] < 128


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--free", "lots"], "lots"),
        (["--free", "1MiB", "--weights", "1KiB"], "lowest permitted widths"),
        (["--free", "1MiB", "--pin", "3"], "LAYER.EXPERT=BITS"),
        (["--free", "1MiB", "--pin", "3.99=6"], "expert 99 of layer 3"),
        (["--free", "1MiB", "--pin", "3.1=7"], "7 bits"),
        (["--free", "1MiB", "--explain", "layers.3"], "not a linear-block"),
        (["--free", "1MiB", "--explain", "3.99.down"], "no such linear-block"),
    ],
)
def test_bad_input_leaves_with_code_2_and_says_what(arguments: list[str], word: str) -> None:
    result = RUNNER.invoke(app, ["plan", str(TINY), *arguments])
    assert result.exit_code == 2
    assert word in result.output + result.stderr


def test_a_folder_without_pages_is_refused(tmp_path: Path) -> None:
    assert RUNNER.invoke(app, ["plan", str(tmp_path), "--free", "1MiB"]).exit_code == 2
    assert RUNNER.invoke(app, ["replay", str(tmp_path / "none"), str(TINY)]).exit_code == 2


def test_a_trace_replays_and_a_changed_one_is_noticed(tmp_path: Path) -> None:
    planned, path = dry_run(TINY, 1, None, RuntimeConfig()), tmp_path / "trace.jsonl"
    table, queue = planned.table, Queue()
    trace = TraceWriter.to(path, table, planned.policy)
    for free in (9, 4, 0):
        seen = Observation(KVState(free, 2**18), threshold_blocks=8)
        queue, plan = plan_step(table, seen, planned.policy, queue)
        trace.lowered(table, seen, plan)
        committed = table.committed.copy()
        committed[[move.row for move in plan.transitions]] = [move.to_bits for move in plan.transitions]
        table = table._replace(committed=committed, desired=committed, since=np.zeros_like(committed))
    trace.close()
    result = RUNNER.invoke(app, ["replay", str(path), str(TINY)])
    assert result.exit_code == 0
    assert "3 replay bit for bit" in result.output
    changed = path.read_text("utf-8").replace('"threshold_blocks": 8', '"threshold_blocks": 7')
    path.write_text(changed, encoding="utf-8")
    assert RUNNER.invoke(app, ["replay", str(path), str(TINY)]).exit_code == 1
