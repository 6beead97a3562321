"""Models by their names on the Hub, from a cache that holds them as a download leaves it."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import huggingface_hub
from transformers import AutoModelForCausalLM

import pagedweight
from pagedweight.checkpoint import FOLDER, CheckpointError
from pagedweight.saving_hub import local_folder
from tests.hf_models import mixtral_m8, quantized_folder, tokens

NAME, COMMIT = "someone/paged", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """The cache after a whole download of a paged model."""
    repository = tmp_path / "models--someone--paged"
    shutil.copytree(quantized_folder("M8"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path


def same_answers(model) -> bool:
    with torch.no_grad():
        return torch.equal(model(tokens(1, 5)).logits, pagedweight.load(quantized_folder("M8"))(tokens(1, 5)).logits)


def test_a_paged_model_loads_by_its_name_both_ways(hub_cache: Path) -> None:
    where = {"cache_dir": hub_cache, "local_files_only": True}
    assert same_answers(AutoModelForCausalLM.from_pretrained(NAME, **where))
    config = pagedweight.RuntimeConfig(budget_bytes=2**21)
    model = pagedweight.from_pretrained(NAME, config=config, **where)
    assert model.pagedweight.kv is not None
    with model.pagedweight.held_at(6):
        assert same_answers(model)


def test_pages_that_transformers_leaves_out_are_downloaded(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache / "models--someone--paged" / "snapshots" / COMMIT
    shutil.rmtree(snapshot / FOLDER)
    where = {"cache_dir": hub_cache, "local_files_only": True}
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: snapshot)
        with pytest.raises(CheckpointError, match="has no folder pagedweight with the pages of its experts"):
            AutoModelForCausalLM.from_pretrained(NAME, **where)
    asked: list[tuple] = []

    def download(name: str, **kwargs) -> Path:
        asked.append((name, kwargs["allow_patterns"], kwargs["revision"], Path(kwargs["cache_dir"])))
        shutil.copytree(quantized_folder("M8") / FOLDER, snapshot / FOLDER)
        return snapshot

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert same_answers(AutoModelForCausalLM.from_pretrained(NAME, **where))
    assert asked == [(NAME, ["pagedweight/*"], COMMIT, hub_cache)]


def test_of_a_dense_model_no_more_is_downloaded_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repositories hold the same weights in other forms too, in folders or beside."""
    source, target = tmp_path / "source", tmp_path / "target"
    model = mixtral_m8(num_local_experts=2, intermediate_size=32)
    model.save_pretrained(source, max_shard_size="60KB")
    wanted = {path.name for path in source.iterdir()}
    for other in (
        "consolidated.safetensors",
        "original/model.safetensors",
        "original/params.json",
        "pytorch_model.bin",
    ):
        (source / other).parent.mkdir(exist_ok=True)
        (source / other).write_bytes(b"the same again")

    def download(name: str, allow_patterns: list[str], ignore_patterns: str) -> Path:
        for path in source.rglob("*"):
            own = str(path.relative_to(source))
            asked_for = any(fnmatch(own, pattern) for pattern in allow_patterns) and not fnmatch(own, ignore_patterns)
            if path.is_file() and asked_for:
                (target / own).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / own)
        return target

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_folder("someone/dense") == target
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == wanted


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_said_so(tmp_path: Path) -> None:
    refused = r"there is no folder .*; give a model's folder or its name on the Hub"
    for name in (tmp_path / "nowhere", "a/b/c", "./nowhere", "../nowhere", "nowhere/"):
        for read in (local_folder, pagedweight.from_pretrained):
            with pytest.raises(ValueError, match=refused):
                read(name)
