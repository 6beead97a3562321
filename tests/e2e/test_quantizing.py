"""quantize() of a folder: layer by layer, from where a killed run stopped, and equal to quantizing the loaded model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

import pagedweight
from pagedweight.calibration.stored import load_statistics, save_statistics
from pagedweight.calibration.text import Windows
from pagedweight.calibration.tuning import TuningOptions
from pagedweight.checkpoint import Checkpoint, CheckpointError, CheckpointWriter
from pagedweight.policy import Policy
from pagedweight.saving_folder import DenseFolder
from pagedweight.saving_source import FolderSource, ModelSource
from tests.calibration.support import batch, statistics_of
from tests.hf_families import family_model
from tests.hf_models import FAMILIES, mixtral_m8, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*experts saw too few:UserWarning")
SMALL = {"num_local_experts": 3, "intermediate_size": 32}
TUNING = TuningOptions(epochs=1, rows=2)


def dense_folder(model: PreTrainedModel, folder: Path, shard: str = "60KB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return dense_folder(mixtral_m8(**SMALL), tmp_path / "dense")


def pages(folder: Path) -> dict[str, str]:
    """Checksums of everything under pagedweight/ but the metadata, which also says where the pages come from."""
    files = sorted(path for path in (folder / "pagedweight").iterdir() if path.name != "metadata.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def everything(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def windows(rows: int = 4, length: int = 16) -> Windows:
    return Windows(tokens(rows, length), torch.ones(rows, length, dtype=torch.bool), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_pages_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    """Per-expert tensors over several shards (M8, Q60), and fused three-dimensional ones (G16)."""
    model = FAMILIES[family]()
    source = dense_folder(model, tmp_path / "dense", "200KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    pagedweight.quantize(source, tmp_path / "streamed", device="cpu", widths=(2, 3))
    pagedweight.quantize(model, tmp_path / "loaded", widths=(2, 3))
    assert pages(tmp_path / "streamed") == pages(tmp_path / "loaded")
    ids = tokens(1, 6)
    with torch.no_grad():
        streamed, loaded = (pagedweight.load(tmp_path / name)(ids).logits for name in ("streamed", "loaded"))
    assert torch.equal(streamed, loaded)


# Families whose files differ from the model's tensors in ways of their own: names, joined or transposed or interleaved
# rows, biases, no gate, matrices of all experts in one.
@pytest.mark.parametrize(
    "family",
    [
        *("dbrx", "ernie4_5_moe", "gpt_oss", "granitemoe", "jamba", "lfm2_moe", "llama4_text", "minimax_m2"),
        *("nemotron_h", "phimoe", "qwen3_5_moe_text"),
    ],
)
def test_a_family_is_read_from_its_files_as_transformers_loads_it(family: str, tmp_path: Path) -> None:
    model = family_model(family)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    streamed, loaded = FolderSource(tmp_path, torch.device("cpu")), ModelSource(model)
    assert [experts.path for experts in streamed.found] == [experts.path for experts in loaded.found]
    assert [experts.shape for experts in streamed.found] == [experts.shape for experts in loaded.found]
    for index, experts in enumerate(streamed.found):
        assert all(map(torch.equal, streamed.weights(index), loaded.weights(index)))
        assert experts.has_weights
        streamed.release(index)
        assert not experts.has_weights
    (tmp_path / "out").mkdir()
    streamed.write_rest(tmp_path / "out")
    kept = DenseFolder(tmp_path / "out").tensors.keys()
    biases = {f"{experts.path}.{name}" for experts in loaded.found for name in experts.biases()}
    assert biases <= kept
    assert len(kept - biases) < len(DenseFolder(tmp_path).tensors)


def test_experts_kept_in_an_unknown_way_are_loaded_whole_with_a_warning(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedweight.saving_names.JOINED", ["SomethingNew"])
    with pytest.warns(UserWarning, match="is loaded whole: .*gate_up_proj is made of .* which is not known here"):
        out = pagedweight.quantize(dense, tmp_path / "out", device="cpu")
    monkeypatch.undo()
    assert pages(out) == pages(pagedweight.quantize(dense, tmp_path / "streamed", device="cpu"))


def test_case_36_what_is_no_expert_weight_is_copied_byte_for_byte(dense: Path, tmp_path: Path) -> None:
    out = pagedweight.quantize(dense, tmp_path / "out")
    before, after = DenseFolder(dense), DenseFolder(out)
    experts = {name for name in before.tensors if re.search(r"experts\.\d+\.w[123]", name)}
    assert len(experts) == 2 * 3 * 3
    assert after.tensors.keys() == before.tensors.keys() - experts
    for name, entry in after.tensors.items():
        old = before.tensors[name]
        assert (entry.dtype, entry.shape) == (old.dtype, old.shape)
        assert entry.file.read_bytes()[entry.begin : entry.end] == old.file.read_bytes()[old.begin : old.end]
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {"quant_method": "pagedweight"}
    assert (out / "tokenizer_config.json").read_text() == "{}"


class Killed(BaseException):
    """What a signal would do, at a chosen moment."""


class Killer:
    """Progress that kills the run when it has been called `at` times."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, step: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed(step)


def kill_and_go_on(run, out: Path, moments: list[int]) -> set[str]:
    """Kill a run after so many steps, again and again, then let it end; the steps it was killed in."""
    steps = set()
    for moment in moments:
        with pytest.raises(Killed) as killed:
            run(out, Killer(moment))
        steps.add(str(killed.value))
        with pytest.raises(CheckpointError):
            pagedweight.load(out)
    run(out, lambda step, done, total: None)
    return steps


def test_a_run_killed_at_every_point_goes_on_and_ends_with_the_same_bytes(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CheckpointWriter.__init__.__kwdefaults__, "shard_bytes", 20_000)
    counted: list[int] = []

    def run(out: Path, progress) -> None:
        pagedweight.quantize(dense, out, progress=progress)

    run(tmp_path / "whole", lambda step, done, total: counted.append(done))
    assert counted == list(range(1, 13))
    # Every block: with shards this small a killed run loses none or one, so each goes a little further.
    assert kill_and_go_on(run, tmp_path / "killed", [0, 3, 3, 3]) == {"layer 0", "layer 1"}
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")
    assert len(pages(tmp_path / "killed")) > 5


def test_a_run_killed_around_every_renaming_never_loads_half_written(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files get their names one by one; the folder loads when the last one has its own, and not before."""
    monkeypatch.setitem(CheckpointWriter.__init__.__kwdefaults__, "shard_bytes", 20_000)
    whole = pagedweight.quantize(dense, tmp_path / "whole", widths=(2, 3))
    rename, out = os.replace, tmp_path / "killed"
    moments: set[tuple[str, str]] = set()

    def kill_once(target: Path, moment: str) -> None:
        if (Path(target).name, moment) not in moments:
            moments.add((Path(target).name, moment))
            raise Killed(target)

    def rename_or_die(source: Path, target: Path) -> None:
        kill_once(target, "before")
        rename(source, target)
        kill_once(target, "after")

    monkeypatch.setattr(os, "replace", rename_or_die)
    while ("metadata.json", "after") not in moments:
        with pytest.raises(Killed):
            pagedweight.quantize(dense, out, widths=(2, 3))
        assert (out / "pagedweight" / "metadata.json").exists() == (("metadata.json", "after") in moments)
    assert {re.split(r"[-.]", name)[0] for name, _ in moments} == {"model", "pages", "partial", "policy", "metadata"}
    assert len(moments) >= 2 * 10
    pagedweight.quantize(dense, out, widths=(2, 3))
    assert everything(out) == everything(whole)


@pytest.mark.parametrize("patched", [False, True])
def test_a_model_whose_writing_is_killed_never_loads_without_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    """transformers would draw the experts at random and warn."""
    model = mixtral_m8(**SMALL)
    if patched:
        pagedweight.patch(model)
    write = pagedweight.save if patched else pagedweight.quantize
    save_dense, rename = PreTrainedModel.save_pretrained, os.replace

    def save_and_die(*args: object, **kwargs: object) -> None:
        save_dense(*args, **kwargs)
        raise Killed

    def rename_and_die(source: Path, target: Path) -> None:
        rename(source, target)
        raise Killed

    for owner, name, dying in ((PreTrainedModel, "save_pretrained", save_and_die), (os, "replace", rename_and_die)):
        monkeypatch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            write(model, tmp_path)
        monkeypatch.undo()
        with pytest.raises((OSError, ValueError)):  # CheckpointError is one
            AutoModelForCausalLM.from_pretrained(tmp_path)
    write(model, tmp_path)
    assert pagedweight.load(tmp_path).pagedweight.snapshot().mean_bits == 6
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "pagedweight"]


def test_a_killed_run_at_level_best_goes_on_too(dense: Path, tmp_path: Path) -> None:
    def run(out: Path, progress) -> None:
        pagedweight.quantize(dense, out, level="best", calibration=windows(), tuning=TUNING, progress=progress)

    run(tmp_path / "whole", lambda step, done, total: None)
    # Statistics that were taken are not taken again.
    moments = [0, 3, 11, 2, 5]
    assert kill_and_go_on(run, tmp_path / "killed", moments) == {"calibration", "layer 0", "layer 1", "tuning"}
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")
    assert not (tmp_path / "killed" / "pagedweight-draft").exists()


def test_a_run_by_another_recipe_starts_again(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        pagedweight.quantize(dense, tmp_path / "out", level="best", calibration=windows(), progress=Killer(10))
    pagedweight.quantize(dense, tmp_path / "out", progress=lambda *step: None)
    pagedweight.quantize(dense, tmp_path / "fresh")
    assert pages(tmp_path / "out") == pages(tmp_path / "fresh")


def test_a_model_in_memory_never_goes_on_from_another_ones_codes(dense: Path, tmp_path: Path) -> None:
    """Nothing tells one model in memory from another: what a killed run left may be of weights that were others."""
    recipe = {"level": "best", "calibration": windows(), "tuning": TUNING}

    def kill_in_tuning(step: str, done: int, total: int) -> None:
        if step == "tuning":
            raise Killed(step)

    with pytest.raises(Killed):
        pagedweight.quantize(mixtral_m8(seed=1, **SMALL), tmp_path / "out", progress=kill_in_tuning, **recipe)
    model = AutoModelForCausalLM.from_pretrained(dense)
    pagedweight.quantize(model, tmp_path / "out", **recipe)
    assert pages(tmp_path / "out") == pages(pagedweight.quantize(model, tmp_path / "fresh", **recipe))


def test_codes_for_other_widths_are_not_taken_up(dense: Path, tmp_path: Path) -> None:
    recipe = {"level": "best", "calibration": windows(), "tuning": TUNING}
    with pytest.raises(Killed):
        pagedweight.quantize(dense, tmp_path / "out", widths=(2, 3), progress=Killer(15), **recipe)
    assert (tmp_path / "out" / "pagedweight-draft" / "pagedweight" / "metadata.json").exists()
    pagedweight.quantize(dense, tmp_path / "out", widths=(2, 4), **recipe)
    fresh = pagedweight.quantize(dense, tmp_path / "fresh", widths=(2, 4), **recipe)
    assert everything(tmp_path / "out") == everything(fresh)


def test_a_draft_does_not_stay_when_a_run_without_text_ends(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        pagedweight.quantize(dense, tmp_path / "out", level="best", calibration=windows(), progress=Killer(10))
    assert (tmp_path / "out" / "pagedweight-draft").exists()
    assert everything(pagedweight.quantize(dense, tmp_path / "out")) == everything(
        pagedweight.quantize(dense, tmp_path / "fresh")
    )


@pytest.mark.parametrize("device", ["cuda:99", "nowhere"])
def test_a_device_that_is_not_there_is_refused_at_once(dense: Path, tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{device}'.*give one that torch has here"):
        pagedweight.quantize(dense, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


def test_of_one_file_and_an_index_the_file_counts_as_for_transformers(dense: Path, tmp_path: Path) -> None:
    other = mixtral_m8(seed=1, **SMALL)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", dense)
    loaded = AutoModelForCausalLM.from_pretrained(dense)
    assert torch.equal(loaded.lm_head.weight, other.lm_head.weight)
    assert pages(pagedweight.quantize(dense, tmp_path / "out")) == pages(
        pagedweight.quantize(other, tmp_path / "fresh")
    )


def test_levels_lower_the_damage_and_say_so_in_the_policy(dense: Path, tmp_path: Path) -> None:
    statistics = statistics_of(AutoModelForCausalLM.from_pretrained(dense), batch(8, 64))
    save_statistics(statistics, tmp_path / "statistics")
    stored = load_statistics(tmp_path / "statistics")
    damage = {}
    for level in ("fast", "balanced", "best"):
        out = pagedweight.quantize(dense, tmp_path / level, level=level, calibration=stored)
        policy = Policy.load(out / "pagedweight")
        damage[level] = policy.sensitivity.sum(0)
        np.testing.assert_allclose(policy.m_cal.reshape(2, 3, 2).sum(1), 1.0)
        assert Checkpoint.open(out).recipe["level"] == level
    assert (damage["balanced"] < damage["fast"]).all()
    assert (damage["best"] < damage["balanced"])[:3].all()  # at 2 to 4 bits, which it moves codes for
    again = pagedweight.quantize(dense, tmp_path / "again", level="best", calibration=statistics)
    assert everything(again) == everything(tmp_path / "best")


def test_patch_quantizes_at_a_level_too(dense: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense)
    statistics = statistics_of(model, batch(8, 64))
    out = pagedweight.quantize(model, tmp_path / "out", level="best", calibration=statistics)
    patched, ids = pagedweight.patch(model, level="best", calibration=statistics), tokens(1, 6)
    assert torch.equal(patched(ids).logits, pagedweight.load(out)(ids).logits)
    np.testing.assert_array_equal(patched.pagedweight.policy.s_bar, Policy.load(out / "pagedweight").s_bar)


@pytest.mark.parametrize("level", ["balanced", "best"])
def test_a_level_that_needs_calibration_is_refused_without(dense: Path, tmp_path: Path, level: str) -> None:
    with pytest.raises(ValueError, match=f"level '{level}' weighs errors by calibration; give calibration"):
        pagedweight.quantize(dense, tmp_path / "out", level=level)
    with pytest.raises(ValueError, match="the levels are fast, balanced, best"):
        pagedweight.quantize(dense, tmp_path / "out", level="worst")
    assert not (tmp_path / "out").exists()


def remove_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def cut_a_shard(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])


def remove_an_expert(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(name for name in content["weight_map"] if name.endswith("experts.1.w2.weight"))
    path = folder / content["weight_map"][name]
    whole = path.read_bytes()
    path.write_bytes(whole.replace(name.encode(), name.replace("w2", "v2").encode()))


def keep_experts_in_8_bits(folder: Path) -> None:
    """Of the last layer: what would otherwise be found out after all others are done."""
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path).items()
        last = {
            name: t.to(torch.float8_e4m3fn) if "layers.1" in name and ".experts." in name else t for name, t in tensors
        }
        save_file(last, path, {"format": "pt"})


def name_a_file_elsewhere(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    outside = folder.parent / "elsewhere.safetensors"
    shard.rename(outside)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, f"../{outside.name}"))


DAMAGES = {
    "a missing shard": (remove_a_shard, "is missing; download the model again"),
    "a shard of another folder": (name_a_file_elsewhere, "which is no file of its own folder"),
    "a cut shard": (cut_a_shard, "lies beyond the end of the file; download the model again"),
    "experts in 8 bits": (keep_experts_in_8_bits, "are .*F8_E4M3.*; give a model in one of bfloat16"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no safetensors": (
        lambda folder: [path.unlink() for path in folder.glob("model*")],
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "a quantized model": (
        lambda folder: (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}'),
        "is quantized already",
    ),
    "an expert without a tensor": (remove_an_expert, "has tensors for 3 experts of .*, 5 rows|lacks|download it again"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_will_not_do_is_refused_before_anything_is_written(
    dense: Path, tmp_path: Path, damage: str
) -> None:
    change, message = DAMAGES[damage]
    change(dense)
    with pytest.raises(ValueError, match=message):
        pagedweight.quantize(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_quantized_into_itself(dense: Path) -> None:
    before = everything(dense)
    with pytest.raises(ValueError, match="holds the model itself; write to another folder"):
        pagedweight.quantize(dense, dense)
    assert everything(dense) == before


def test_files_of_an_earlier_model_do_not_stay(dense: Path, tmp_path: Path) -> None:
    """Left-over shards would win over the new ones."""
    other = dense_folder(mixtral_m8(seed=1, **SMALL), tmp_path / "other", "5GB")
    out = pagedweight.quantize(other, tmp_path / "out")
    assert (out / "model.safetensors").exists()
    pagedweight.quantize(dense, out)
    assert everything(out) == everything(pagedweight.quantize(dense, tmp_path / "fresh"))


MEASURE = """
import sys, torch, pagedweight
from pathlib import Path
torch.set_num_threads(1)
small, large, out = sys.argv[1:]
pagedweight.quantize(small, Path(out) / "small", widths=(2,))  # what imports and caches take is there now
def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
pagedweight.quantize(large, Path(out) / "large", widths=(2,))
print(status("VmHWM") - before)
"""


def test_case_34_no_more_than_a_layer_is_in_memory(dense: Path, tmp_path: Path) -> None:
    """All experts together would not fit under the bound."""
    shape = {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 8, "num_hidden_layers": 3}
    model = mixtral_m8(**shape).to(torch.bfloat16)
    layer_bytes = 2 * 8 * 3 * 512 * 512
    large = dense_folder(model, tmp_path / "large", "20MB")
    del model
    arguments = [sys.executable, "-c", MEASURE, dense, large, tmp_path / "out"]
    # The allocator gives freed memory back at once, so that the peak is what was in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    repository = Path(__file__).parents[2]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=repository, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    working_set = 16 << 20  # k-means of one chunk of rows, its threads' memory, one linear-block on its way to disk
    assert int(done.stdout) < layer_bytes + working_set, f"{int(done.stdout) / 2**20:.1f} MiB"
    assert layer_bytes + working_set < 0.8 * 3 * layer_bytes
    shutil.rmtree(tmp_path / "large")
