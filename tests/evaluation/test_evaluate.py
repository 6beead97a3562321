"""`pagedweight eval` on the model that ships: what it measures, goes on with, and refuses."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the hf extra")

from pagedweight.checkpoint import Checkpoint
from pagedweight.cli import eval as cli_eval
from pagedweight.cli.main import app
from pagedweight.demo.run import CHECKPOINT
from pagedweight.evaluation.run import Plan

RUNNER = CliRunner()
BUDGETS = ("3", "3.5")


def run(*arguments: object):
    return RUNNER.invoke(app, ["eval", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    text, answers = folder / "text.txt", folder / "answers.jsonl"
    text.write_text("The river runs from the hills to the old harbour, where boats wait for the tide. " * 40)
    lines = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(8)]
    answers.write_text("\n".join(map(json.dumps, lines)))
    return [f"--task=text={text}", f"--task=answers={answers}"]


@pytest.fixture(scope="module")
def arguments(tasks: list[str]) -> list[object]:
    budgets = [f"--budget={one}" for one in BUDGETS]
    return [CHECKPOINT, *tasks, *budgets, "--count", 2, "--length", 64, "--json", "--device", "cpu"]


@pytest.fixture(scope="module")
def measured(arguments: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "evaluation.json"
    result = run(*arguments, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def test_every_method_budget_and_task_has_figures_for_each_item(measured: Path) -> None:
    content = json.loads(measured.read_text())
    assert content["command"]
    assert {"machine", "versions", "settings"} <= content.keys()
    for method in ("uniform", "pagedweight static", "pagedweight"):
        for budget in BUDGETS:
            for task in ("text", "answers"):
                cell = content["cells"][method][budget][task]
                assert len(cell["kl"]) == len(cell["loss"]) == 2
                assert cell["weight_bytes"] <= cell["budget_bytes"]
                assert np.isfinite(cell["loss"]).all()
    own = content["cells"]["reference"]["own"]["text"]
    np.testing.assert_allclose(own["kl"], 0, atol=1e-6)


def test_a_uniform_width_holds_its_own_bytes_and_loses_what_a_direct_measurement_says(measured: Path) -> None:
    import pagedweight
    from pagedweight.calibration.divergence import diverge, take_reference
    from pagedweight.evaluation.items import Size, read_items

    content = json.loads(measured.read_text())
    cell = content["cells"]["uniform"]["3"]["text"]
    assert cell["bits"] == 3
    model = pagedweight.from_pretrained(CHECKPOINT, dtype=torch.float32)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    path = measured.parent / "again.txt"
    path.write_text("The river runs from the hills to the old harbour, where boats wait for the tide. " * 40)
    items = read_items(
        path, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], Size(64, 2), tokenizer.eos_token_id
    )
    reference = take_reference(model, items.windows)
    model.pagedweight.set_bits(3)
    np.testing.assert_allclose(diverge(model, reference, items.scored).kl, cell["kl"], rtol=1e-3)


def test_a_second_run_measures_only_what_is_missing(arguments: list[object], measured: Path) -> None:
    before = json.loads(measured.read_text())["cells"]
    result = run(*arguments, "--out", measured, "--method", "hotness tiers", "--method", "uniform")
    assert result.exit_code == 0, result.output
    after = json.loads(measured.read_text())["cells"]
    assert set(after) - set(before) == {"hotness tiers"}
    assert {name: after[name] for name in before} == before


def test_a_file_of_other_settings_is_not_gone_on_with(arguments: list[object], measured: Path) -> None:
    result = run(*arguments, "--out", measured, "--seed", 5)
    assert result.exit_code == 2
    assert "was measured with other settings (seed)" in result.stderr


def test_nor_is_one_of_another_policy(arguments: list[object], measured: Path, tmp_path: Path) -> None:
    other = tmp_path / CHECKPOINT.name
    shutil.copytree(CHECKPOINT, other)
    policy = other / "pagedweight" / "policy.json"
    policy.write_text(json.dumps(json.loads(policy.read_text()) | {"alpha": 0.25}))
    result = run(other, *arguments[1:], "--out", measured)
    assert result.exit_code == 2
    assert "was measured with other settings (pages)" in result.stderr


def test_nor_is_one_of_another_text_of_the_same_name(arguments: list[object], measured: Path, tmp_path: Path) -> None:
    swapped = []
    for argument in map(str, arguments):
        name, _, path = argument.rpartition("=")
        if name.startswith("--task"):
            other = tmp_path / Path(path).name
            other.write_text(Path(path).read_text() + "\n")
            argument = f"{name}={other}"
        swapped.append(argument)
    result = run(*swapped, "--out", measured)
    assert result.exit_code == 2
    assert "was measured with other settings (texts)" in result.stderr


def test_bytes_are_a_budget_too(tasks: list[str], tmp_path: Path) -> None:
    sizes = Checkpoint.open(CHECKPOINT).layout
    result = run(
        CHECKPOINT, tasks[1], "--budget", "4MiB", "--method", "pagedweight static", "--count", 1, "--length", 32,
        "--out", tmp_path / "bytes.json", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["rows"][-1]
    assert 0 < row["weight_bytes"] <= 4 * 2**20
    assert sizes.floor_width <= row["bits"] <= sizes.parent_width


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "best"], "no method is called 'best'"),
        (["--task", "text"], "write NAME=FILE"),
        (["--task", "x=/nowhere/at/all"], "is not a file"),
        (["--budget", "100"], "between 1 and 16"),
        (["--budget", "many"], "is not a size"),
    ],
)
def test_what_cannot_be_measured_is_refused(tasks: list[str], tmp_path: Path, more: list[str], message: str) -> None:
    result = run(CHECKPOINT, *tasks, *more, "--out", tmp_path / "refused.json")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "refused.json").exists()


@pytest.mark.parametrize(
    ("kept", "more", "message"),
    [
        (None, ["--method", "best"], "no method is called 'best'"),
        (5, ["--harness-limit", "6"], "of another --harness-limit (5)"),
        (5, [], "of another --harness-limit (5)"),
    ],
)
def test_what_the_harness_cannot_go_on_with_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int | None, more: list[str], message: str
) -> None:
    monkeypatch.setattr(cli_eval, "require_extras", lambda *extras: None)
    plan = Plan(CHECKPOINT, {}, (), (), device="cpu")
    if kept is not None:
        stored = {"settings": plan.settings(), "harness_limit": kept, "cells": {}}
        (tmp_path / "kept.json").write_text(json.dumps(stored))
    wanted = ["--harness", "sea", "--device", "cpu", "--out", tmp_path / "kept.json"]
    result = run(CHECKPOINT, *wanted, *more)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_harness_is_asked_for_by_its_extra_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    result = run(CHECKPOINT, "--harness", "sea", "--out", tmp_path / "none.json")
    assert result.exit_code == 2
    assert "pip install 'pagedweight[hf,eval]'" in result.stderr


def test_a_task_of_the_harness_from_a_local_file_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the eval extra")
    (tmp_path / "data.jsonl").write_text("\n".join(f'{{"text": "The sea is {c}.", "label": 0}}' for c in "ab"))
    (tmp_path / "sea.yaml").write_text(
        "task: sea\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_target: label\n"
        "doc_to_choice: ['yes', 'no']\nmetric_list: [{metric: acc}]\n"
    )
    result = run(
        CHECKPOINT, "--harness", "sea", "--harness-folder", tmp_path, "--method", "uniform", "--budget", "3",
        "--out", tmp_path / "harness.json", "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "harness.json").read_text())["harness"]["uniform, 3"]["sea"]
    assert 0 <= scores["acc,none"] <= 1
