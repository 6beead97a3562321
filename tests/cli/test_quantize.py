"""The commands quantize and calibrate: what they write and say, and one sentence before a model loads otherwise."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the hf extra")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import pagedweight
from pagedweight.checkpoint import Checkpoint
from pagedweight.cli.main import app
from pagedweight.cli.quantize import bytes_by_width
from pagedweight.policy import Policy
from tests.hf_models import COMMON, mixtral_m8

RUNNER = CliRunner()
WORDS = [f"w{i}" for i in range(100)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer of words that has no padding token."""
    folder = tmp_path_factory.mktemp("dense")
    mixtral_m8(num_local_experts=3, intermediate_size=32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i + 3 for i, word in enumerate(WORDS)} | {"?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    generator = torch.Generator().manual_seed(0)
    lines = [" ".join(WORDS[i] for i in torch.randint(0, 100, (60,), generator=generator)) for _ in range(40)]
    path.write_text("\n".join(json.dumps({"text": line}) for line in [*lines, ""]))
    return path


@pytest.fixture(scope="module")
def paged(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pagedweight.quantize(dense, tmp_path_factory.mktemp("paged"), widths=(2, 3, 4))


def run(*arguments: object, **options: object):
    return RUNNER.invoke(app, [str(argument) for argument in arguments], **options)


def test_quantize_writes_a_folder_and_sums_it_up(dense: Path, tmp_path: Path) -> None:
    result = run("quantize", dense, tmp_path / "out", "--widths", "2,4", "--codebook", "4=cubic", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    layout = Checkpoint.open(tmp_path / "out").layout
    assert (summary["linear_blocks"], summary["layers"]) == (12, 2)
    assert layout.codebooks == {2: "lut16", 4: "cubic"}
    # gate_up (64, 64) and down (64, 32) of 6 experts: planes, and 16-bit tables of 4 entries or 4 coefficients.
    assert summary["bytes_by_width"] == {
        "2": 6 * (2 * (64 * 8 + 64 * 4) + 2 * 64 * 4 * 2),
        "4": 6 * (4 * (64 * 8 + 64 * 4) + 2 * 64 * 4 * 2),
    }
    assert bytes_by_width(layout)[2] == summary["bytes_by_width"]["2"]
    pagedweight.load(tmp_path / "out")


def test_a_level_above_fast_takes_text_and_keeps_its_statistics(dense: Path, text: Path, tmp_path: Path) -> None:
    statistics = tmp_path / "statistics"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they belong to the summary
        result = run(
            *("quantize", dense, tmp_path / "one", "--level", "balanced", "--data", text, "--widths", "2,3"),
            *("--windows", 4, "--keep-statistics", statistics),
        )
    assert result.exit_code == 0, result.output
    assert "linear blocks: 12" in result.stdout
    assert "bytes by width: 2 bits: " in result.stdout
    again = run(
        *("quantize", dense, tmp_path / "two", "--level", "balanced", "--statistics", statistics, "--widths", "2,3")
    )
    assert again.exit_code == 0, again.output
    one, two = (tmp_path / name / "pagedweight" / "pages-00001.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_calibrate_writes_the_policy(paged: Path, dense: Path, text: Path) -> None:
    before = Policy.load(paged / "pagedweight")
    quick = ("--windows", 5, "--search-windows", 0, "--json")
    result = run("calibrate", paged, "--data", text, "--model", dense, *quick, env={"FORCE_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert "statistics" in result.stderr  # its bars, as on a terminal
    assert "gains" in result.stderr
    summary = json.loads(result.stdout)
    assert summary["skipped_documents"] == 1
    assert summary["sequences"] == 5  # the last one is shorter than the others
    assert not (Policy.load(paged / "pagedweight").s_bar == before.s_bar).any()


def test_case_16_experts_that_no_token_reaches_are_quantized_and_named(dense: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text(" ".join(["w1"] * 40))
    result = run("quantize", dense, tmp_path / "out", "--data", few, "--widths", "2")
    assert result.exit_code == 0, result.output
    assert "experts saw too few calibration tokens" in result.stderr
    assert "layers.0.experts." in result.stderr
    again = run("quantize", dense, tmp_path / "again", "--data", few, "--widths", "2")
    assert again.exit_code == 0
    one, two = (tmp_path / name / "pagedweight" / "pages-00001.safetensors" for name in ("out", "again"))
    assert one.read_bytes() == two.read_bytes()


def refused(*arguments: object) -> str:
    """The sentence on stderr of a command that leaves with code 2."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("pagedweight: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading any model fails the test."""

    def fail(*arguments: object, **settings: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    monkeypatch.setattr("transformers.MixtralForCausalLM.from_pretrained", fail)


@pytest.mark.usefixtures("no_model")
def test_bad_options_of_quantize_are_one_sentence(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "nowhere" in refused("quantize", tmp_path / "nowhere", out)
    assert "the levels are fast, balanced, best" in refused("quantize", dense, out, "--level", "great")
    assert "give calibration" in refused("quantize", dense, out, "--level", "best")
    assert "each from 2 to 8" in refused("quantize", dense, out, "--widths", "1,2")
    assert "--widths two" in refused("quantize", dense, out, "--widths", "two")
    assert "write WIDTH=NAME" in refused("quantize", dense, out, "--codebook", "cubic")
    assert "use one of" in refused("quantize", dense, out, "--codebook", "4=square")
    assert "exclude each other" in refused("quantize", dense, out, "--data", text, "--statistics", tmp_path)
    assert "add --data" in refused("quantize", dense, out, "--keep-statistics", tmp_path)
    assert "has no statistics.json" in refused("quantize", dense, out, "--statistics", tmp_path)
    assert "is not a file" in refused("quantize", dense, out, "--data", tmp_path / "absent.txt")
    assert "holds the model itself" in refused("quantize", dense, dense)
    assert not out.exists()


@pytest.mark.usefixtures("no_model")
def test_case_29_calibration_text_that_will_not_do_is_refused(paged: Path, dense: Path, tmp_path: Path) -> None:
    """Empty, too short, and no text at all; a tokenizer without a padding token is no obstacle."""
    for name, content, message in (
        ("empty.txt", "", "holds no text"),
        ("lines.txt", "w1 w2 w3", "has 3 tokens"),
        ("broken.jsonl", "{", "is not JSON"),
        ("other.jsonl", '{"body": "w1"}', "has no text"),
    ):
        (tmp_path / name).write_text(content)
        assert message in refused("calibrate", paged, "--data", tmp_path / name)
        assert message in refused("quantize", dense, tmp_path / "out", "--data", tmp_path / name)
    assert "give --data" in refused("calibrate", paged)
    assert "quantize the model into" in refused("calibrate", tmp_path, "--data", tmp_path / "lines.txt")
    assert "methods are gradient, forward" in refused("calibrate", paged, "--data", "x", "--method", "guess")
    assert "heads is 'round'" in refused("calibrate", paged, "--data", tmp_path / "lines.txt", "--heads", "round")
    assert not (tmp_path / "out").exists()


def test_case_37_a_model_without_routed_experts_is_refused(tmp_path: Path) -> None:
    """Nothing to quantize is an error, not a folder of zero linear-blocks."""
    settings = {**COMMON, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(**settings)).save_pretrained(tmp_path / "plain")
    assert "routed experts" in refused("quantize", tmp_path / "plain", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_statistics_of_another_model_are_refused(dense: Path, text: Path, tmp_path: Path) -> None:
    run("quantize", dense, tmp_path / "one", "--data", text, "--widths", "2", "--keep-statistics", tmp_path / "s")
    mixtral_m8(num_local_experts=2, intermediate_size=32).save_pretrained(tmp_path / "other")
    message = refused("quantize", tmp_path / "other", tmp_path / "two", "--statistics", tmp_path / "s")
    assert "calibrate this model" in message
