"""A dense model's folder, read tensor by tensor: some into place in a larger one, the rest copied byte for byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pagedweight.checkpoint_format import CheckpointError
from pagedweight.checkpoint_header import Entry, read_header
from pagedweight.checkpoint_shard import header_of, sync_and_rename
from pagedweight.documents import read_document

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
COPY_BYTES = 1 << 24
LONGEST_NAME_BYTES = 255
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of each file, to tell a folder from one with other weights


class Piece(NamedTuple):
    """A tensor of the folder that fills part of a target: all of it, or target[expert, first : first + its rows]."""

    name: str
    expert: int | None
    first: int


class DenseFolder:
    """The safetensors files of a model's folder. Nothing stays open or in memory between two reads.

    tensors: by name. CheckpointError when there are none, or a file is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [folder / name for name in file_names(folder)]
        self.tensors: dict[str, Entry] = {}
        for file in self.files:
            self.tensors |= _entries(file)

    def identity(self) -> str:
        """Hex SHA-256 of names, sizes, headers and samples of the files' data: other weights give another one."""
        digest = hashlib.sha256()
        for path in self.files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                for sample in range(SAMPLES + 1):
                    file.seek(min(size * sample // SAMPLES, max(0, size - SAMPLE_BYTES)))
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()

    def read(self, target: Tensor, pieces: Sequence[Piece]) -> None:
        """Fill a contiguous tensor on the CPU from its pieces, of shapes that fit, with no copy beside it."""
        for piece in pieces:
            entry = self.tensors[piece.name]
            part = target
            if piece.expert is not None:
                part = target[piece.expert, piece.first : piece.first + entry.shape[0]]
            with open(entry.file, "rb") as file:
                file.seek(entry.begin)
                wanted = entry.end - entry.begin
                if file.readinto(part.reshape(-1).view(torch.uint8).numpy()) != wanted:
                    raise CheckpointError(f"{entry.file} ends within {piece.name}; copy the file again")

    def copy_rest(self, out: Path, taken: set[str], extra: Mapping[str, Tensor]) -> None:
        """Every tensor that is not taken, byte for byte under its own name, and some extra ones; with an index."""
        parts = [
            {name: entry for name, entry in self.tensors.items() if entry.file == file and name not in taken}
            for file in self.files
        ]
        parts = [part for part in parts if part]
        count = len(parts) + bool(extra)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
        for old in out.glob("model*.safetensors*"):
            old.unlink()
        for name, part in zip(names, parts, strict=False):
            _copy(out / name, part)
        index = {tensor: name for name, part in zip(names, parts, strict=False) for tensor in part}
        if extra:
            _write(out / names[-1], extra)
            index |= dict.fromkeys(extra, names[-1])
        if count > 1:
            size = sum(e.end - e.begin for part in parts for e in part.values()) + sum(t.nbytes for t in extra.values())
            document = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
            (out / INDEX).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def file_names(folder: Path) -> list[str]:
    """Names of the files that hold a model's weights. CheckpointError when the folder says of none."""
    if (folder / SINGLE).is_file():  # transformers, too, looks for it first
        return [SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = set(read_document(folder / INDEX)["weight_map"].values())
            outside = sorted(name for name in names if not _is_own(name))
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / INDEX} is damaged ({error}); download the model again") from error
        for name in outside:
            raise CheckpointError(
                f"{folder / INDEX} names {name!r:.80}, which is no file of its own folder; download the model again"
            )
        return sorted(names)
    raise CheckpointError(
        f"{folder} has neither {SINGLE} nor {INDEX}; save the model with save_pretrained, which writes safetensors"
    )


def _is_own(name: str) -> bool:
    """Whether a file's name leads to no other folder."""
    return Path(name).name == name and name not in ("", "..") and len(name.encode()) <= LONGEST_NAME_BYTES


def _entries(path: Path) -> dict[str, Entry]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download the model again")
    try:
        return read_header(path).entries
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; download the model again") from error


def _copy(path: Path, entries: Mapping[str, Entry]) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    sizes = {name: (e.dtype, e.shape, e.end - e.begin) for name, e in entries.items()}
    with open(unfinished, "wb") as out:
        out.write(header_of(sizes, {"format": "pt"}))
        for entry in entries.values():
            for chunk in _bytes_of(entry):
                out.write(chunk)
    sync_and_rename(unfinished, path)


def _bytes_of(entry: Entry) -> Iterator[bytes]:
    with open(entry.file, "rb") as file:
        file.seek(entry.begin)
        left = entry.end - entry.begin
        while left:
            chunk = file.read(min(left, COPY_BYTES))
            if not chunk:
                raise CheckpointError(f"{entry.file} ends within a tensor; copy the file again")
            left -= len(chunk)
            yield chunk


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    unfinished = path.with_name(f"{path.name}.tmp")
    with open(unfinished, "wb") as out:
        sizes = {name: (names[t.dtype], tuple(t.shape), t.nbytes) for name, t in tensors.items()}
        out.write(header_of(sizes, {"format": "pt"}))
        for tensor in tensors.values():
            out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    sync_and_rename(unfinished, path)
