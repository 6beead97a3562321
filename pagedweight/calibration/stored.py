"""Statistics in a folder: one safetensors file per layer, read when that layer is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pagedweight.calibration.statistics import BlockSums, LayerSums, Statistics
from pagedweight.checkpoint_shard import sync_and_rename
from pagedweight.documents import read_document
from pagedweight.layout import MoeLayer, Projection

DOCUMENT, VERSION = "statistics.json", 1
SUMS = ("columns", "rows", "total", "moment")


def save_statistics(statistics: Statistics, folder: str | Path) -> None:
    """Write the sums of a calibration run. The folder can be loaded once all of it is there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DOCUMENT).unlink(missing_ok=True)
    for index, layer in enumerate(statistics.layers):
        tensors = {"mass": layer.mass, "counts": layer.counts}
        for projection, block in zip(Projection, layer.blocks, strict=True):
            for name in SUMS:
                if getattr(block, name) is not None:
                    tensors[f"{projection.label}.{name}"] = getattr(block, name)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / _file(index))
    document = {
        "format": "pagedweight-statistics",
        "version": VERSION,
        "tokens": statistics.tokens,
        "sequences": statistics.sequences,
        "layers": [asdict(layer.shape) for layer in statistics.layers],
    }
    unfinished = folder / f"{DOCUMENT}.tmp"
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sync_and_rename(unfinished, folder / DOCUMENT)


def is_whole(folder: Path) -> bool:
    """Whether save_statistics came to its end there."""
    return (folder / DOCUMENT).is_file()


def load_statistics(folder: str | Path, device: torch.device | str = "cpu") -> Statistics:
    """What save_statistics wrote; a layer's sums are read whenever they are asked for.

    ValueError when the folder is not whole.
    """
    folder = Path(folder)
    path = folder / DOCUMENT
    if not path.is_file():
        raise ValueError(f"{folder} has no {DOCUMENT}; calibrate with a text to write statistics")
    try:
        document = read_document(path)
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']}, and this release reads {VERSION}")
        shapes = [MoeLayer(**layer) for layer in document["layers"]]
        tokens, sequences = int(document["tokens"]), int(document["sequences"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be used ({error}); calibrate again") from error
    return Statistics(_StoredLayers(folder, shapes, torch.device(device)), tokens, sequences)


class _StoredLayers(Sequence[LayerSums]):
    def __init__(self, folder: Path, shapes: list[MoeLayer], device: torch.device) -> None:
        self._folder, self._shapes, self._device = folder, shapes, device

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> LayerSums:
        path = self._folder / _file(range(len(self._shapes))[index])
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                tensors = {name: file.get_tensor(name).to(self._device) for name in names}
            blocks = [
                BlockSums(*(tensors.get(f"{projection.label}.{name}") for name in SUMS)) for projection in Projection
            ]
            return LayerSums(self._shapes[index], tensors["mass"], tensors["counts"], tuple(blocks))
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(f"{path} cannot be read ({error}); calibrate again") from error


def statistics_digest(statistics: Statistics) -> str:
    """Hex SHA-256 that tells a calibration run from another."""
    digest = hashlib.sha256(f"{statistics.tokens} {statistics.sequences}".encode())
    for layer in statistics.layers:
        for sums in (layer.mass, layer.counts, *(block.total for block in layer.blocks)):
            digest.update(sums.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _file(index: int) -> str:
    return f"statistics-{index:05d}.safetensors"
