"""The head of a safetensors file, checked before anything it says is believed, and tensors read by it."""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedweight.documents import read_json, without_waiting

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_DIMENSIONS = 16
TORCH_DTYPES = {
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
}


class Entry(NamedTuple):
    """One tensor of a file. begin, end: its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """entries: by tensor name. bytes: the file's size. sha256: of the length field and the header, in hex."""

    entries: dict[str, Entry]
    bytes: int
    sha256: str


def read_header(path: Path) -> Header:
    """The head of an ordinary file: every tensor lies within the file and has the bytes of its dtype and shape.

    ValueError, saying why, for any other file. Reads no more than the head.
    """
    with open(path, "rb", opener=without_waiting) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no ordinary file")
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(facts.st_size - 8, MAX_HEADER_BYTES):
            raise ValueError("its header would be longer than the file")
        text = file.read(length)
    content = read_json(text)
    if not isinstance(content, dict):
        raise ValueError(f"its header is a {type(content).__name__}")
    content.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length, facts.st_size) for name, value in content.items()}
    return Header(entries, facts.st_size, hashlib.sha256(prefix + text).hexdigest())


def _entry(path: Path, name: str, value: Any, data: int, size: int) -> Entry:
    if not isinstance(value, dict):
        raise ValueError(f"{name[:80]} is a {type(value).__name__}")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or len(dtype) > 20 or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name[:80]} lacks a dtype, a shape or its place in the file")
    begin, end = (data + offset for offset in offsets)
    if not begin <= end <= size:
        raise ValueError(f"{name[:80]} lies beyond the end of the file")
    if dtype in TORCH_DTYPES and prod(shape) * TORCH_DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"{name[:80]} is {dtype} {shape} in {end - begin} bytes")
    return Entry(path, dtype, tuple(shape), begin, end)


def _sizes(value: Any) -> bool:
    """Whether a JSON value is a list of sizes."""
    return isinstance(value, list) and len(value) <= MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in value)


def leaves_folder(path: Path) -> bool:
    """Whether a file is a link out of its folder, or in the Hub's cache, whose files are links, out of its model's."""
    folder = path.parent.resolve()
    own = next((above.parent for above in folder.parents if above.name == "snapshots"), folder)
    return not path.resolve().is_relative_to(own)


class TensorReader:
    """Reads tensors of one file, each into memory of its own; the file stays open.

    safetensors' own reader loses two integers with every tensor (0.8.0), which adds up where pages are read for ever,
    and a file that shrinks under its mapping ends the process.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self._path, self._entries = path, entries
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def tensor(self, name: str) -> Tensor:
        """OSError when the file cannot be read or has become shorter."""
        entry = self._entries[name]
        octets = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        view, at = memoryview(octets.numpy()), entry.begin
        while at < entry.end:
            # Not readinto: threads and forked processes share the descriptor's position.
            got = os.preadv(self._descriptor, [view[at - entry.begin :]], at)
            if not got:
                raise OSError(f"{self._path} ends within {name}")
            at += got
        return octets.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
