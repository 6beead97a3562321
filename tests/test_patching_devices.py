"""A model spread over devices: one runtime for each, and answers, files and figures of the whole.

A CPU has one device, but two names for it: `cpu` and `cpu:0` are two arenas, two tables and two planners.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import DynamicCache, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.discovery import find_experts
from pagedweight.discovery_devices import devices_of, kernel_cache_folder, refuse_unwritable
from pagedweight.layout import BlockId, Projection
from pagedweight.patching import assemble
from tests.hf_models import FAMILIES, mixtral_m8, quantized_folder, tokens

CPU, OTHER = torch.device("cpu"), torch.device("cpu:0")
SETTINGS = {"offload_free_blocks": 2, "reload_free_blocks": 4, "min_dwell_steps": 2, "block_tokens": 4}


def spread(family: str, config: RuntimeConfig | None = None, folder: Path | None = None, **options) -> PreTrainedModel:
    model = FAMILIES[family]()
    found = find_experts(model)
    return assemble(model, found, [CPU, OTHER], folder, None, config or RuntimeConfig(), **options)


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("family", ["M8", "G16"])
@torch.no_grad()
def test_answers_and_files_are_those_of_one_device(family: str, tmp_path: Path) -> None:
    folder, ids = quantized_folder(family), tokens(2, 9)
    whole, parted = pagedweight.load(folder), spread(family, folder=folder)
    paged = parted.pagedweight
    assert len(paged.parts) == 2
    assert len({part.arena.memory.data_ptr() for part in paged.parts}) == 2
    bits = np.random.default_rng(0).choice(paged.layout.widths, paged.layout.rows)
    for width in (6, bits, 2):
        for model in (whole, parted):
            model.pagedweight.set_bits(width)
        assert torch.equal(parted(ids).logits, whole(ids).logits)
        assert (paged.snapshot().bits == whole.pagedweight.snapshot().bits).all()
        assert paged.snapshot().mean_bits == whole.pagedweight.snapshot().mean_bits
    assert paged.snapshot().bytes_by_width == whole.pagedweight.snapshot().bytes_by_width
    parted.save_pretrained(tmp_path)
    assert digests(tmp_path) == digests(folder)
    paged.check()


def test_quantizing_in_place_gives_the_same_pages(tmp_path: Path) -> None:
    model = mixtral_m8()
    assemble(model, find_experts(model), [OTHER, CPU], None, None, RuntimeConfig())
    pagedweight.save(model, tmp_path / "spread")
    pagedweight.save(pagedweight.patch(mixtral_m8()), tmp_path / "whole")
    assert digests(tmp_path / "spread") == digests(tmp_path / "whole")


@torch.no_grad()
def test_a_device_that_fails_leaves_no_other_ones_runtime_behind(tmp_path: Path) -> None:
    """The second device's trace cannot be written, when the first one's runtime, its thread and its trace are there."""
    (tmp_path / "trace.1").mkdir()
    model = FAMILIES["M8"]()
    config = RuntimeConfig(budget_bytes=2**22, background_rows=0, trace_path=str(tmp_path / "trace"))
    threads = threading.active_count()
    with pytest.raises(IsADirectoryError) as failed:
        assemble(model, find_experts(model), [CPU, OTHER], None, None, config)
    assert failed.tb, "kept, as a notebook keeps it: what its frames hold is not collected"
    assert threading.active_count() == threads
    open_files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert tmp_path / "trace.0" not in open_files
    assert not hasattr(model, "pagedweight")
    assert torch.isfinite(model(tokens(1, 4)).logits).all()
    pagedweight.patch(model)


def test_every_devices_weights_make_room_for_their_own_layers() -> None:
    """Four layers, three of them on one device: its cache grows three times as fast, and so its weights fall lower."""
    make = lambda: mixtral_m8(num_hidden_layers=4)  # noqa: E731
    model = make()
    weights = 330_000
    config = RuntimeConfig(budget_bytes=3 * weights, **SETTINGS)
    assemble(model, find_experts(model), [CPU, OTHER, CPU, CPU], None, None, config)
    paged = model.pagedweight
    cache = paged.new_cache()
    prompt = tokens(3, 10)
    model(prompt, past_key_values=cache)
    held = [own.held_bytes for own in cache.caches]
    assert held[0] == 3 * held[1] > 0
    assert paged.snapshot().kv_bytes == cache.held_bytes == sum(held)
    for _ in range(80):
        model(prompt[:, :1], past_key_values=cache)
    paged.check()
    first, second = (part.snapshot() for part in paged.parts)
    assert first.mean_bits < 5.5
    assert first.mean_bits < second.mean_bits
    second_cache = copy.deepcopy(cache)
    assert second_cache.held_bytes == cache.held_bytes
    for own in (cache, second_cache):
        own.release()
    assert paged.snapshot().kv_bytes == 0


@pytest.mark.parametrize("family", ["M8", "G16"])
@torch.no_grad()
def test_tokens_of_generate_with_the_spread_cache_are_those_of_the_models_own(family: str) -> None:
    model = spread(family, RuntimeConfig(budget_bytes=2**22, **SETTINGS), quantized_folder(family))
    with model.pagedweight.held_at(4):
        settings = {"max_new_tokens": 24, "do_sample": False}
        expected = model.generate(tokens(2, 9), past_key_values=DynamicCache(config=model.config), **settings)
        cache = model.pagedweight.new_cache()
        assert torch.equal(model.generate(tokens(2, 9), past_key_values=cache, **settings), expected)
    assert len(cache.layers) == 2
    other = pagedweight.load(quantized_folder(family), config=RuntimeConfig(budget_bytes=2**22)).pagedweight
    with pytest.raises(ValueError, match="another model's arena"):
        model(tokens(2, 1), past_key_values=other.new_cache())


def test_figures_and_words_are_of_the_right_device() -> None:
    config = RuntimeConfig(budget_bytes=2**21, pinned_experts=((0, 1, 4), (1, 2, 5)), max_requests=2, **SETTINGS)
    model = spread("M8", config, quantized_folder("M8"))
    paged = model.pagedweight
    with pytest.raises(ValueError, match="layers are on several; use generate with"):
        model.generate_batch([[3, 4]])
    assert [part.config.pinned_experts for part in paged.parts] == [((0, 1, 4),), ((1, 2, 5),)]
    snapshot = paged.snapshot()
    assert sum(snapshot.bytes_by_owner.values()) == sum(part.arena.memory.numel() for part in paged.parts)
    assert paged.glance().bytes_by_owner == snapshot.bytes_by_owner
    assert snapshot.kv.headroom_blocks == min(part.snapshot().kv.headroom_blocks for part in paged.parts)
    paged.set_bits(3)
    paged.parts[1].set_bits(5)
    assert "5 bits" in paged.explain(BlockId(1, 0, Projection.DOWN))
    assert "3 bits" in paged.explain(0, 0, "down")
    assert paged.explain().startswith("cpu: ")
    assert "\ncpu:0: " in paged.explain()
    paged.set_request(1, confidence=0.5)
    paged.slots.set(torch.tensor([0, 1]))
    assert [part.slots.view(3).tolist() for part in paged.parts] == [[0, 1, -1]] * 2


def test_unpatching_gives_every_layer_its_weights_back() -> None:
    model, dense = mixtral_m8(), mixtral_m8()
    assemble(model, find_experts(model), [CPU, OTHER], None, None, RuntimeConfig(), keep_original=True)
    pagedweight.unpatch(model)
    for got, expected in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_a_device_map_says_where_experts_belong() -> None:
    model = mixtral_m8()
    found = find_experts(model)
    assert devices_of(model, found) == [CPU, CPU]
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1.mlp": 1, "lm_head": 1}
    assert devices_of(model, found) == [torch.device("cuda:0"), torch.device("cuda:1")]
    for place, message in (
        ("cpu", "spread over cpu, cuda:0; load the model on GPUs alone"),
        ("disk", "offloaded to disk"),
    ):
        model.hf_device_map["model.layers.1.mlp"] = place
        with pytest.raises(ValueError, match=message):
            devices_of(model, found)


def test_case_121_a_kernel_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert kernel_cache_folder() == tmp_path / "new" / "cache"
    refuse_unwritable(kernel_cache_folder())
    assert not list(kernel_cache_folder().iterdir())
    (tmp_path / "file").write_bytes(b"")  # a folder without write permission is no obstacle for root
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); set TRITON_CACHE_DIR to a folder"):
        refuse_unwritable(tmp_path / "file" / "cache")
