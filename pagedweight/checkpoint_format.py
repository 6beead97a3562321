"""What the files of a checkpoint hold: names, dtypes and shapes of tensors, shard headers, and the metadata document.

docs/format.md is the definition.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedweight.bitplane import plane_words
from pagedweight.documents import read_document
from pagedweight.layout import BlockId, Layout, MoeLayer, PackedBlock

FOLDER, METADATA, PARTIAL = "pagedweight", "metadata.json", "partial.json"
FORMAT_VERSION = 1
SHARD_NAME = re.compile(r"pages-\d{5}\.safetensors")
DTYPES = {torch.uint32: "U32", torch.float16: "F16", torch.uint8: "U8", torch.float32: "F32"}
FIELDS = ("format", "version", "widths", "codebooks", "recipe", "layers", "shards")
LIST_LIMIT = 20  # problems named in one message

Specs = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> (safetensors dtype, shape)


class CheckpointError(ValueError):
    """A checkpoint that is missing, unfinished, damaged or of another version; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of whole linear-blocks: rows first_row .. first_row + rows of the layout.

    header_sha256 covers the length field and the header, sha256 the whole file.
    """

    file: str
    first_row: int
    rows: int
    bytes: int
    header_sha256: str
    sha256: str

    def __post_init__(self) -> None:
        if not SHARD_NAME.fullmatch(self.file):  # a bare name: no path leaves the folder
            raise ValueError(f"a shard is named {self.file!r}; shards are named pages-00001.safetensors and so on")
        if self.rows < 1:
            raise ValueError(f"{self.file} has {self.rows} linear-blocks; a shard has at least one")


class Document(NamedTuple):
    """The metadata document. recipe: what was quantized, and how. s_bar: an unfinished run's damage, (rows, W)."""

    layout: Layout
    shards: list[Shard]
    recipe: Mapping[str, str] = MappingProxyType({})
    s_bar: list[list[float]] | None = None


def table_parts(codebook: str, bits: int) -> Specs:
    """The tensors of one table: suffix -> (dtype, shape after N)."""
    parts: dict[str, Specs] = {
        "lut16": {f"lut{bits}": ("F16", (1 << bits,))},
        "lut8": {f"lut{bits}": ("U8", (1 << bits,)), f"scale{bits}": ("F32", ())},
        "cubic": {f"coef{bits}": ("F16", (4,))},
        "affine": {f"scale{bits}": ("F32", (2,))},
    }
    return parts[codebook]


def block_specs(layout: Layout, block: BlockId, shape: tuple[int, int]) -> Specs:
    """Every tensor that a linear-block has in its file."""
    rows, columns = shape
    specs: Specs = {f"{block}.plane{p}": ("U32", (rows, plane_words(columns))) for p in range(layout.parent_width)}
    for bits in layout.widths:
        for suffix, (dtype, rest) in table_parts(layout.codebooks[bits], bits).items():
            specs[f"{block}.{suffix}"] = (dtype, (rows, *rest))
    return specs


def block_tensors(layout: Layout, block: BlockId, packed: PackedBlock) -> dict[str, Tensor]:
    """A linear-block's tensors as they go into its file, on the CPU and independent of the block's own memory."""
    tensors = {f"{block}.plane{p}": plane.view(torch.uint32) for p, plane in enumerate(packed.planes.contiguous())}
    for bits in layout.widths:
        suffixes = table_parts(layout.codebooks[bits], bits)
        parts = _split_table(packed.tables[bits]) if len(suffixes) > 1 else [packed.tables[bits]]
        tensors.update({f"{block}.{suffix}": part for suffix, part in zip(suffixes, parts, strict=True)})
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _split_table(table: Tensor) -> list[Tensor]:
    """Bytes and row scales of a lut8 table."""
    return [table[:, :-4], table[:, -4:].contiguous().view(torch.float32).squeeze(1)]


def join_table(parts: list[Tensor]) -> Tensor:
    """A table in the form of `pagedweight.bitplane.table_values` from the tensors of its file."""
    if len(parts) == 1:
        return parts[0]
    octets, scale = parts
    return torch.cat([octets, scale.unsqueeze(1).view(torch.uint8)], dim=1)


def specs_of(tensors: Mapping[str, Tensor]) -> Specs:
    """What a file that holds these tensors says of them."""
    return {
        name: (DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)) for name, tensor in tensors.items()
    }


def dump(document: Document) -> str:
    """The metadata document's text."""
    layout = document.layout
    content = {
        "format": "pagedweight",
        "version": FORMAT_VERSION,
        "widths": list(layout.widths),
        "codebooks": {str(bits): layout.codebooks[bits] for bits in layout.widths},
        "recipe": dict(document.recipe),
        "layers": [asdict(layer) for layer in layout.moe_layers],
        "shards": [asdict(shard) for shard in document.shards],
    }
    if document.s_bar is not None:
        content["s_bar"] = document.s_bar
    return json.dumps(content, indent=1) + "\n"


def parse(path: Path) -> Document:
    """Read a metadata document; CheckpointError when it is damaged or of another version, a warning on new fields."""
    try:
        content = read_document(path)
        if content["format"] != "pagedweight" or content["version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} is {content['format']!r:.80} version {content['version']!r:.80}; "
                f"this release reads pagedweight version {FORMAT_VERSION}"
            )
        document = _document(content, path)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {str(error)[:500]}") from error
    _warn_of_unknown(set(content) - {*FIELDS, "s_bar"}, path)
    return document


def _document(content: dict[str, Any], path: Path) -> Document:
    widths = tuple(content["widths"])
    if not all(type(bits) is int for bits in widths):
        raise TypeError(f"widths are {content['widths']!r:.200}; wanted whole numbers")
    codebooks = {bits: content["codebooks"][str(bits)] for bits in widths}
    layers = tuple(MoeLayer(**_known(MoeLayer, layer, path)) for layer in content["layers"])
    numbers = [layer.layer for layer in layers]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"layers are {str(numbers)[:200]}; wanted each once, ascending")
    shards = [Shard(**_known(Shard, shard, path)) for shard in content["shards"]]
    if len({shard.file for shard in shards}) < len(shards):
        raise ValueError("two shards are the same file")
    recipe = content.get("recipe", {})
    if not all(isinstance(value, str) for value in recipe.values()):
        raise TypeError("recipe holds something other than strings")
    return Document(Layout(layers, widths, codebooks), shards, recipe, content.get("s_bar"))


def _known(kind: type, record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of a record that this release knows; each must have the type the dataclass says."""
    known = {field.name: field.type for field in fields(kind)}
    _warn_of_unknown(record.keys() - known.keys(), path)
    for name in record.keys() & known.keys():
        if type(record[name]).__name__ != known[name]:
            raise TypeError(f"{name} is {record[name]!r:.200}; wanted {known[name]}")
    return {name: value for name, value in record.items() if name in known}


def _warn_of_unknown(names: set[str], path: Path) -> None:
    if names:
        warnings.warn(f"{path} has fields this release does not know: {', '.join(sorted(names))}", stacklevel=4)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(got: Specs, wanted: Specs) -> str:
    """What is wrong about a set of tensors in words; empty when nothing is."""
    problems = [f"missing {name[:80]}" for name in wanted.keys() - got.keys()]
    problems += [f"unexpected {name[:80]}" for name in got.keys() - wanted.keys()]
    problems += [
        f"{name[:80]} is {got[name][0]} {list(got[name][1])}, not {wanted[name][0]} {list(wanted[name][1])}"
        for name in got.keys() & wanted.keys()
        if got[name] != wanted[name]
    ]
    more = len(problems) - LIST_LIMIT
    return "; ".join(sorted(problems)[:LIST_LIMIT]) + (f"; and {more} more" if more > 0 else "")


def why_unread(directory: Path) -> str:
    """What a folder without metadata is, and what to do; the rest of a sentence that names the file."""
    if not directory.is_dir():
        return f": there is no folder {directory}; quantize the model into it first"
    if (directory / FOLDER / PARTIAL).is_file():
        return f" (a run was not finished); quantize the model into {directory} first"
    if (directory / "config.json").is_file() and not (directory / FOLDER).is_dir():
        return ", as a dense model has none; quantize the model into another folder and give that"
    return f"; quantize the model into {directory} first"
