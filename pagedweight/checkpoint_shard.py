"""A safetensors file written tensor by tensor, so that no more than one of them is in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pagedweight.checkpoint_format import Specs, specs_of

ITEM_BYTES = {"U32": 4, "F32": 4, "F16": 2, "U8": 1}
HEADER_ALIGNMENT = 8  # of the data behind it


class ShardDigest(NamedTuple):
    """bytes: the file's size. header_sha256: of the length field and the header, sha256: of the whole file."""

    bytes: int
    header_sha256: str
    sha256: str


def specs_bytes(specs: Specs) -> int:
    """Bytes of the data of these tensors."""
    return sum(ITEM_BYTES[dtype] * prod(shape) for dtype, shape in specs.values())


def header_of(
    entries: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length field and header of a file that holds these tensors, name -> (dtype, shape, bytes), in order."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, (dtype, shape, size) in entries.items():
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def sync_and_rename(source: Path, target: Path) -> None:
    """Give a finished file its name, once its bytes are on disk."""
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)


class ShardWriter:
    """One file of tensors whose names, dtypes and shapes are known before their data. It has its name once closed."""

    def __init__(self, path: Path, specs: Specs) -> None:
        self._path, self._unfinished = path, path.with_name(f"{path.name}.tmp")
        self._left = dict(specs)
        header = header_of({name: (*spec, specs_bytes({name: spec})) for name, spec in specs.items()})
        self._file = open(self._unfinished, "wb")  # noqa: SIM115 - open until the last tensor has come
        self._sha256 = hashlib.sha256()
        self._header_sha256 = hashlib.sha256(header).hexdigest()
        self._bytes = 0
        self._put(header)

    @property
    def full(self) -> bool:
        """Whether every tensor is written."""
        return not self._left

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """The next tensors, on the CPU."""
        for name, spec in specs_of(tensors).items():
            wanted = next(iter(self._left.items()), None)
            assert wanted == (name, spec), (wanted, name, spec)
            del self._left[name]
            self._put(tensors[name].contiguous().view(torch.uint8).numpy().data)

    def close(self) -> ShardDigest:
        assert self.full, next(iter(self._left))
        self._file.close()
        sync_and_rename(self._unfinished, self._path)
        return ShardDigest(self._bytes, self._header_sha256, self._sha256.hexdigest())

    def abandon(self) -> None:
        """Close the file without giving it its name."""
        self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self._bytes += len(data) if isinstance(data, bytes) else data.nbytes
