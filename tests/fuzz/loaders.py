"""What reads files that may have come from anywhere, each beside files that are whole, to be damaged and read again."""

from __future__ import annotations

import io
import random
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from pagedweight.bitplane import pack_codes
from pagedweight.checkpoint import Checkpoint, CheckpointError, CheckpointWriter
from pagedweight.cli.report_run import read_run
from pagedweight.layout import Layout, MoeLayer, PackedBlock, table_form
from pagedweight.patching import policy_of
from pagedweight.policy import PolicyError
from pagedweight.runtime.planner_trace import replay
from pagedweight.runtime.planner_trace_lines import TraceError
from pagedweight.saving_folder import DenseFolder
from tests.fuzz.damage import damage
from tests.runtime.planner_support import parent_problem
from tests.runtime.test_planner_trace import recorded

OWN_ERRORS = (CheckpointError, PolicyError, TraceError)
LONGEST_SENTENCE = 4000
# Python and numpy memory that reading may take for each byte that is there: JSON as objects is the worst of it.
BYTES_PER_BYTE, BYTES_ANYWAY = 64, 2**21

BOOKS = {2: "lut8", 3: "lut16", 5: "cubic", 6: "affine"}
LAYOUT = Layout((MoeLayer(1, 2, 40, 11), MoeLayer(4, 1, 5, 33, "gelu_tanh")), tuple(BOOKS), BOOKS)
PROBLEM = parent_problem((3, 3))


class Subject(NamedTuple):
    """write makes the files in a folder; read reads them and asserts that what is read is what was written."""

    write: Callable[[Path], None]
    read: Callable[[Path], None]


def write_checkpoint(folder: Path) -> None:
    writer = CheckpointWriter(folder, LAYOUT, shard_bytes=4000, recipe={"level": "fast"})
    for block in LAYOUT.blocks():
        writer.add(block, _block(LAYOUT.row(block)))
    writer.finish()


def _block(row: int) -> PackedBlock:
    generator = torch.Generator().manual_seed(row)
    shape = LAYOUT.row_shapes()[row]
    codes = torch.randint(0, 64, shape, dtype=torch.uint8, generator=generator)
    tables = {}
    for bits, book in BOOKS.items():
        dtype, entries = table_form(book, bits)
        octets = torch.randint(0, 60, (shape[0], entries * dtype.itemsize), dtype=torch.uint8, generator=generator)
        tables[bits] = octets.view(dtype)
    return PackedBlock(pack_codes(codes, 6), tables, shape[1])


def read_checkpoint(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    for block in opened.layout.blocks():
        opened.block(block)
    opened.verify()
    for block in opened.layout.blocks():
        got, wanted = opened.block(block), _block(LAYOUT.row(block))
        assert torch.equal(got.planes, wanted.planes)
        assert all(torch.equal(got.tables[bits], wanted.tables[bits]) for bits in BOOKS)


def write_policy(folder: Path) -> None:
    (folder / "pagedweight").mkdir()
    PROBLEM.policy.save(folder / "pagedweight")


def read_policy(folder: Path) -> None:
    policy = policy_of(folder)
    assert policy.experts.mass.sum() >= 0
    assert np.isfinite(policy.sensitivity).all()
    assert all(np.isfinite(heads).all() for heads in policy.heads)


def write_trace(folder: Path) -> None:
    (folder / "trace.jsonl").write_text("\n".join(recorded(PROBLEM, 3)), encoding="utf-8")


def read_trace(folder: Path) -> None:
    """As `pagedweight replay` and `pagedweight report` do."""
    path = folder / "trace.jsonl"
    if not path.is_file():  # the command line's own to tell
        raise TraceError("no file")
    text = path.read_text(encoding="utf-8", errors="replace")
    list(replay(io.StringIO(text), PROBLEM.policy))
    if text.count("\n"):  # `report` wants a step
        read_run(io.StringIO(text))


def write_dense(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    names = {f"layers.{at}.weight": f"model-{1 + at % 2:05d}-of-00002.safetensors" for at in range(4)}
    for file in set(names.values()):
        tensors = {name: torch.randn(4, 6, generator=generator) for name in names if names[name] == file}
        save_file(tensors, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 384}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(str(index).replace("'", '"'), encoding="utf-8")


def read_dense(folder: Path) -> None:
    from pagedweight.saving_folder import Piece

    dense = DenseFolder(folder)
    dense.identity()
    for name, entry in dense.tensors.items():
        if entry.dtype == "F32":
            dense.read(torch.empty(entry.shape), [Piece(name, None, 0)])
    (folder / "out").mkdir()
    dense.copy_rest(folder / "out", set(), {})


SUBJECTS = {
    "checkpoint": Subject(write_checkpoint, read_checkpoint),
    "policy": Subject(write_policy, read_policy),
    "trace": Subject(write_trace, read_trace),
    "dense folder": Subject(write_dense, read_dense),
}


def try_seed(seed: int, whole: dict[str, Path], scratch: Path) -> str:
    """Damage one subject's files as the seed has it and read them; says what was done and what came of it.

    AssertionError for anything but what was written, or one sentence in an error of our own, in memory that the files
    justify. whole: each subject's undamaged folder.
    """
    rng = random.Random(seed)
    name = rng.choice(list(SUBJECTS))
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(whole[name], scratch)
    size = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    done = f"{name}: " + "; ".join(damage(scratch, rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    size += sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SUBJECTS[name].read(scratch)
        outcome = "read"
    except OWN_ERRORS as error:
        outcome = str(error)
        assert outcome.strip(), done
        assert "\n" not in outcome.strip(), (done, outcome)
        assert len(outcome) < LONGEST_SENTENCE, (done, outcome)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {done}: {type(error).__name__}: {error}"[:2000]) from error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < BYTES_ANYWAY + BYTES_PER_BYTE * size, (seed, done, peak, size)
    return f"{done} -> {outcome}"


def whole_folders(under: Path) -> dict[str, Path]:
    """Every subject's files, written and read once."""
    folders = {}
    for name, subject in SUBJECTS.items():
        folders[name] = under / name.replace(" ", "-")
        folders[name].mkdir(parents=True)
        subject.write(folders[name])
    return folders
