"""transformers' own ways to load and save, with paged experts: in any order of imports, from pages and from weights."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.accelerate import compute_module_sizes
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.checkpoint import FOLDER, CheckpointError
from pagedweight.demo.run import CHECKPOINT
from pagedweight.integrations.hf_quantizer import PagedWeightQuantizer
from tests.hf_models import FAMILIES, mixtral_m8, quantized_folder, qwen2_moe_q60, tokens

IDS = tokens(2, 9)
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "transformers.md"


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_of_a_folder_with_pages_gives_the_patched_model(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized_folder(family))
    assert torch.equal(logits(model), logits(pagedweight.load(quantized_folder(family))))
    assert model.pagedweight.snapshot().mean_bits == 6
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path)
    assert digests(tmp_path) == digests(quantized_folder(family))


def test_from_pretrained_of_a_dense_folder_quantizes_as_it_loads(tmp_path: Path) -> None:
    mixtral_m8().save_pretrained(tmp_path / "dense")
    config = pagedweight.PagedWeightConfig(runtime=RuntimeConfig(budget_bytes=750_000))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=config, experts_implementation="eager"
    )
    assert model.pagedweight.snapshot().mean_bits < 6
    with model.pagedweight.held_at(4):
        expected = pagedweight.load(quantized_folder("M8"))
        expected.pagedweight.set_bits(4)
        torch.testing.assert_close(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "paged")
    assert digests(tmp_path / "paged").keys() == digests(quantized_folder("M8")).keys()


def test_a_config_that_will_not_do_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ValueError, match="give calibration, or take level 'fast'"):
        pagedweight.PagedWeightConfig(level="best")
    with pytest.raises(TypeError, match="budget_bytes"):
        pagedweight.PagedWeightConfig(budget_bytes=1)


def test_files_may_be_sharded_and_come_back_byte_for_byte(tmp_path: Path) -> None:
    model = pagedweight.load(quantized_folder("G16"))
    first, again = tmp_path / "first", tmp_path / "again"
    model.save_pretrained(first, max_shard_size="20KB")
    assert len(list(first.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(first)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))
    pagedweight.save(loaded, again, max_shard_size="20KB")
    assert digests(again) == digests(first)


def test_what_save_pretrained_cannot_do_is_said(tmp_path: Path) -> None:
    model = pagedweight.patch(mixtral_m8(), checkpoint=quantized_folder("M8"))
    with pytest.raises(ValueError, match="cannot be saved with push_to_hub, state_dict; it takes max_shard_size"):
        model.save_pretrained(tmp_path, state_dict={}, push_to_hub=True)
    assert not list(tmp_path.iterdir())


def test_without_the_import_transformers_refuses_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise make up the experts: the error has to come from what the folder itself says."""
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "pagedweight")
    with pytest.raises(ValueError, match=r"import pagedweight first or use pagedweight\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(quantized_folder("M8"))


def test_pages_that_were_not_downloaded_are_missed_at_once(tmp_path: Path) -> None:
    for path in quantized_folder("M8").iterdir():
        if path.name != FOLDER:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="has no folder pagedweight with the pages of its experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("first", ["pagedweight", "transformers.modeling_utils"])
def test_either_import_may_come_first(first: str) -> None:
    script = f"""
import {first}
import pagedweight, sys
assert {first!r} != "pagedweight" or "torch" not in sys.modules
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(quantized_folder("M8"))!r})
assert model.pagedweight.snapshot().mean_bits == 6
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pages_count_where_layers_are_spread_over_devices() -> None:
    """transformers sees none of them in the model; a device map by its own sizes would put every layer on one GPU."""
    folder = quantized_folder("M8")
    with torch.device("meta"):
        model = mixtral_m8()
    quantizer = PagedWeightQuantizer(pagedweight.PagedWeightConfig(), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model, checkpoint_files=[str(folder / "model.safetensors")])
    sizes, _ = compute_module_sizes(model, quantizer)
    weights = pagedweight.load(folder).pagedweight.snapshot().weight_bytes
    for layer in range(2):
        experts = sizes[f"model.layers.{layer}.mlp.experts"]
        assert experts == weights // 2
        assert sizes[f"model.layers.{layer}"] > experts
    assert not [name for name in model.state_dict() if "experts" in name]


def test_the_config_says_what_a_stranger_needs() -> None:
    config = json.loads((quantized_folder("M8") / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"] == {"quant_method": "pagedweight"}
    assert config["model_type"] == "mixtral"


def test_the_first_hour_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """With a small model in the place of the large one, a budget to match, and the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = qwen2_moe_q60(vocab_size=len(tokenizer), num_experts=8)
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    smaller = {
        "models/Qwen1.5-MoE-A2.7B-Chat": "small",
        "budget_bytes=10 * 2**30": "budget_bytes=2**20",
        "max_new_tokens=400": "max_new_tokens=4",
        'device_map="cuda"': 'device_map="cpu"',
    }
    for large, small in smaller.items():
        assert code.count(large) == 1, large
        code = code.replace(large, small)
    exec(compile(code, GUIDE.name, "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out.count("bits, ") == 2
