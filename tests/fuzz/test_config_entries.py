"""What config.json says of paged experts, damaged: one sentence, or what the files hold."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import AutoModelForCausalLM

import pagedweight
from pagedweight.checkpoint import CheckpointError
from pagedweight.integrations.hf_quantizer import PagedWeightConfig
from pagedweight.integrations.vllm.options import ServingOptions
from tests.hf_models import quantized_folder, tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(quantized_folder("M8"), tmp_path / "model")


def write_entry(folder: Path, entry: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": entry}))


@pytest.mark.parametrize(
    "entry", [None, True, [], {}, "", 5, {"quant_method": ["pagedweight"]}, {"quant_method": "gptq"}]
)
def test_an_entry_that_does_not_name_the_method_is_refused(folder: Path, entry: object) -> None:
    write_entry(folder, entry)
    with pytest.raises(CheckpointError, match="does not say that its experts are paged"):
        pagedweight.load(folder, verify=False)


@pytest.mark.parametrize("text", ["", "[]", "{", "\0", '{"quantization_config": ' + "[" * 100_000])
def test_a_config_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="does not say that its experts are paged"):
        pagedweight.load(folder, verify=False)


@pytest.mark.parametrize(
    "beyond",
    [
        {"bits": 4},
        {"level": "worst"},
        {"level": None},
        {"runtime": {"budget_bytes": 1}},
        {"__class__": "x"},
    ],
)
def test_a_file_decides_nothing_but_the_method(beyond: dict) -> None:
    with pytest.warns(UserWarning, match="which no file decides"):
        config = PagedWeightConfig.from_dict({"quant_method": "pagedweight", **beyond})
    assert vars(config) == vars(PagedWeightConfig())


@torch.no_grad()
def test_transformers_own_loading_ignores_the_rest(folder: Path) -> None:
    write_entry(folder, {"quant_method": "pagedweight", "deferred": "yes", "runtime": "x"})
    with pytest.warns(UserWarning, match="runtime"):
        model = AutoModelForCausalLM.from_pretrained(folder)
    wanted = pagedweight.load(quantized_folder("M8"), verify=False)
    assert torch.equal(model(tokens(1, 5)).logits, wanted(tokens(1, 5)).logits)


def test_a_file_that_defers_its_pages_gives_a_model_that_says_what_to_do(folder: Path) -> None:
    write_entry(folder, {"quant_method": "pagedweight", "deferred": True})
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(RuntimeError, match=r"pages are not loaded; load it with pagedweight\.load"):
        model(tokens(1, 5))


@pytest.mark.parametrize("name", [field.name for field in fields(ServingOptions)])
def test_an_option_of_vllms_additional_config_is_taken_or_named_in_a_sentence(name: str) -> None:
    for value in (None, "x", -1, 2**70, 1.5, ["x"], {"x": 1}, True, float("nan")):
        told = name
        try:
            assert getattr(ServingOptions.of({"pagedweight": {name: value}}), name) == value
        except (TypeError, ValueError) as error:
            told = str(error)
        assert name in told, value
