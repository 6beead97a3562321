"""Whatever happens to files, what is read from them is what was written, or one sentence says why not.

scripts/fuzz_loader.py goes on for as long as one likes; below the seeds, what it and a look at the readers have found.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pagedweight.checkpoint import Checkpoint, CheckpointError
from pagedweight.checkpoint_header import read_header
from pagedweight.documents import read_document, read_json
from pagedweight.policy import Policy, PolicyError
from pagedweight.saving_folder import DenseFolder, file_names
from tests.fuzz.loaders import LAYOUT, PROBLEM, try_seed, whole_folders, write_checkpoint, write_dense

ROOM_BYTES = 2**30  # for other tests' threads; what a damaged file asks for is far beyond


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return whole_folders(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A huge allocation fails instead of being promised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_damaged_files_are_read_as_written_or_refused_in_a_sentence(
    whole: dict[str, Path], tmp_path: Path, little_memory: None
) -> None:
    outcomes = set()

    @settings(max_examples=80, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32))
    def damaged(seed: int) -> None:
        outcomes.add(try_seed(seed, whole, tmp_path / "scratch").endswith("-> read"))

    damaged()
    assert outcomes == {True, False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path / "pagedweight"


def edit(folder: Path, **changes: object) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def layers(**changes: object) -> list[dict]:
    plain = {"hidden": 8, "intermediate": 8, "activation": "silu", "gated": True, "limit": 0.0}
    return [{"layer": 0, "experts": 1} | plain | changes]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": layers(experts=2**40)}, "shards do not cover"),
        ({"layers": layers(hidden=2**62)}, "do not cover|tensors"),
        ({"widths": [2.0, 3, 5, 6]}, "whole numbers"),
        ({"widths": "2356"}, "whole numbers"),
        ({"layers": 2 * layers()}, "each once, ascending"),
        ({"recipe": {"level": ["fast"]}}, "other than strings"),
        ({"format": "x" * 10_000}, "this release reads"),
    ],
)
def test_metadata_that_says_what_cannot_be(folder: Path, changes: dict, says: str, little_memory: None) -> None:
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=says) as raised:
        Checkpoint.open(folder.parent)
    assert len(str(raised.value)) < 1000


def test_a_claim_of_many_linear_blocks_is_checked_against_the_file_before_they_are_listed(folder: Path) -> None:
    """A small document may say that there are millions of experts; a shard with too few tensors ends that."""
    shards = json.loads((folder / "metadata.json").read_text())["shards"][:1]
    edit(folder, layers=layers(experts=2**22), shards=[shards[0] | {"first_row": 0, "rows": 2**23}])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="fewer than 8388608 linear-blocks have"):
        Checkpoint.open(folder.parent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def test_two_shards_may_not_be_one_file(folder: Path) -> None:
    shards = json.loads((folder / "metadata.json").read_text())["shards"]
    shards[1]["file"] = shards[0]["file"]
    edit(folder, shards=shards)
    with pytest.raises(CheckpointError, match="the same file"):
        Checkpoint.open(folder.parent)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' stands twice"),
        ('{"a": NaN}', "NaN is no number"),
        ("-Infinity", "Infinity is no number"),
        ("1e999", "too large"),
        ("1" * 5000, "too large"),
        (str(2**63), "too large"),
        ("", "Expecting value"),
    ],
)
def test_json_in_the_strict_sense(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_json(text)


def test_numbers_that_configs_of_models_hold_are_taken_where_that_is_asked_for() -> None:
    assert read_json('{"limit": [0.0, Infinity]}', constants=True) == {"limit": [0.0, float("inf")]}
    assert read_json(str(2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "folder"])
def test_only_ordinary_files_are_read(folder: Path, target: str) -> None:
    """A pipe without a writer would have us wait, /dev/zero never ends."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    shard = folder / "pages-00002.safetensors"
    shard.unlink()
    shard.symlink_to(target)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=r"cannot be read|link out of its folder"):
        Checkpoint.open(folder.parent)
    for read in (read_header, read_document):
        with pytest.raises((ValueError, IsADirectoryError)) as raised:
            read(shard)
        assert not isinstance(raised.value, OSError) or str(shard) in str(raised.value)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_link_out_of_the_folder_is_not_followed_but_the_hubs_cache_is(tmp_path: Path) -> None:
    """The Hub keeps a model's files under blobs, with links to them under snapshots."""
    hub = tmp_path / "models--one--model"
    snapshot, blobs = hub / "snapshots" / "0123abcd", hub / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_checkpoint(snapshot)
    for path in sorted((snapshot / "pagedweight").iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../../blobs/{path.name}")
    Checkpoint.open(snapshot).verify()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shard = snapshot / "pagedweight" / "pages-00001.safetensors"
    (blobs / shard.name).rename(elsewhere / shard.name)
    shard.unlink()
    shard.symlink_to(elsewhere / shard.name)
    with pytest.raises(CheckpointError, match="link out of its folder"):
        Checkpoint.open(snapshot)


def test_a_file_that_shrinks_under_an_open_checkpoint_ends_in_a_sentence(folder: Path) -> None:
    """Mapped into memory, it would end the process."""
    opened = Checkpoint.open(folder.parent)
    last = list(LAYOUT.blocks())[-1]
    opened.block(last)
    shard = sorted(folder.glob("pages-*"))[-1]
    os.truncate(shard, 100)
    with pytest.raises(CheckpointError, match=r"cannot be read from .* ends within"):
        opened.block(last)


def test_reading_pages_for_ever_loses_nothing(folder: Path) -> None:
    """safetensors' own reader leaves two integers behind with every tensor."""
    opened = Checkpoint.open(folder.parent)
    block = next(LAYOUT.blocks())
    opened.plane(block, 5)
    tracemalloc.start()
    for _ in range(2000):
        opened.plane(block, 5)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 20_000


def test_an_index_names_files_of_its_own_folder(tmp_path: Path) -> None:
    write_dense(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for name in ("..", "../x.safetensors", "/etc/passwd", "", 5, None, ["x"]):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match=r"no file of its own folder|damaged"):
            file_names(tmp_path)


@pytest.mark.parametrize("offsets", [[-8, 88], [96, 0], [0, 2**63 - 1], [0.0, 96], "ab", [0]])
def test_a_tensor_lies_within_its_file(tmp_path: Path, offsets: object) -> None:
    write_dense(tmp_path)
    path = tmp_path / "model-00001-of-00002.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["layers.0.weight"]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match="is damaged"):
        DenseFolder(tmp_path)


def test_a_policys_numbers_and_arrays_come_each_from_its_own_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    PROBLEM.policy.save(tmp_path)
    arrays = load_file(tmp_path / "policy.safetensors")
    save_file({**arrays, "alpha": np.array(3.0)}, tmp_path / "policy.safetensors")
    assert Policy.load(tmp_path).alpha == PROBLEM.policy.alpha


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", "1"), ("alpha", None), ("widths", "23456"), ("widths", [2.0, 3.0]), ("rho_max", [1.0]), ("epsilon", {})],
)
def test_a_policys_scalars_are_numbers(tmp_path: Path, name: str, value: object) -> None:
    PROBLEM.policy.save(tmp_path)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(PolicyError):
        Policy.load(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["policy.json", "policy.safetensors"])
def test_a_policy_in_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    PROBLEM.policy.save(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(PolicyError, match="no ordinary file"):
        Policy.load(tmp_path)


def test_a_policy_in_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    PROBLEM.policy.save(tmp_path)
    path = tmp_path / "policy.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = max(entry["data_offsets"][1] for entry in header.values())
    header["alien"] = {"dtype": "F4", "shape": [2], "data_offsets": [end, end + 1]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :] + b"\0")
    with pytest.raises(PolicyError, match="is damaged"):
        Policy.load(tmp_path)


def test_a_policy_names_no_expert_far_beyond_its_rows() -> None:
    """The planner's tables over (layer, expert) would be as large as the largest number."""
    blocks = PROBLEM.policy.blocks.copy()
    blocks[0, 1] = 2**40
    with pytest.raises(ValueError, match="blocks name expert"):
        PROBLEM.policy.replaced(blocks=blocks)
    blocks[0, 1] = blocks[2, 1]
    with pytest.raises(ValueError, match="each once"):
        PROBLEM.policy.replaced(blocks=blocks)


def test_a_header_that_says_it_is_huge_is_not_made_room_for(folder: Path, little_memory: None) -> None:
    shard = folder / "pages-00001.safetensors"
    content = shard.read_bytes()
    for said in (2**40, 2**63, 2**64 - 1):
        shard.write_bytes(said.to_bytes(8, "little") + content[8:])
        with pytest.raises(CheckpointError, match="cannot be read"):
            Checkpoint.open(folder.parent)
