"""Which tensors of a dense folder make which experts' weights, by the names that transformers itself would load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pagedweight.saving_folder import DenseFolder, Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What transformers does to pieces on disk: nothing, stack one per expert, or stack and then join gate and up rows.
STACKED, JOINED = ["MergeModulelist"], ["MergeModulelist", "Concatenate"]


class UnknownConversion(ValueError):
    """The folder keeps experts in a form that is not known here; transformers can still load the model whole."""


def pieces_by_target(
    folder: DenseFolder, model: PreTrainedModel, targets: Mapping[str, Sequence[int]]
) -> dict[str, list[Piece]]:
    """For each of the model's tensors in `targets`, given with their shapes, the folder's tensors that fill it.

    UnknownConversion when transformers would do more than stack and join; ValueError when a tensor is missing or of
    another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = model.state_dict()
    sources: dict[str, dict[str | None, list[str]]] = {}
    for name in folder.tensors:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target in targets:
            sources.setdefault(target, {}).setdefault(pattern, []).append(name)
    missing = sorted(targets.keys() - sources.keys())
    if missing:
        raise ValueError(f"{folder.folder} lacks {', '.join(missing[:3])}; download the model again")
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    pieces = {target: _pieces(target, found, by_pattern, folder) for target, found in sources.items()}
    for target, shape in targets.items():
        _check_filled(target, tuple(shape), pieces[target], folder)
    return pieces


def _pieces(
    target: str, found: Mapping[str | None, list[str]], converters: Mapping[str, object], folder: DenseFolder
) -> list[Piece]:
    if list(found) == [None] and len(found[None]) == 1:
        return [Piece(found[None][0], None, 0)]
    converter = converters.get(next(iter(found)))
    steps = [type(step).__name__ for step in getattr(converter, "operations", [])]
    dims = [getattr(step, "dim", None) for step in getattr(converter, "operations", [])]
    if None in found or (steps, dims) not in ((STACKED, [0]), (JOINED, [0, 1])):
        raise UnknownConversion(f"{target} is made of {sorted(map(str, found))} by {steps}, which is not known here")
    pieces, first = [], 0
    for pattern in converter.source_patterns:
        names = sorted(found.get(pattern, []), key=_natural)
        if not names:
            raise ValueError(f"{folder.folder} lacks the tensors {pattern} of {target}; download the model again")
        pieces += [Piece(name, expert, first) for expert, name in enumerate(names)]
        first += folder.tensors[names[0]].shape[0]
    return pieces


def _check_filled(target: str, shape: tuple[int, ...], pieces: list[Piece], folder: DenseFolder) -> None:
    """ValueError unless the pieces fill a target of that shape, each row once."""
    filled, rows = set(), 0
    for piece in pieces:
        got = folder.tensors[piece.name].shape
        wanted = shape if piece.expert is None else (got[0], *shape[2:])
        if got != wanted or (piece.expert is not None and piece.first + got[0] > shape[1]):
            raise ValueError(f"{piece.name} in {folder.folder} is {got}; {target} of {shape} has no room for it")
        filled.add(piece.expert)
        rows += got[0]
    if pieces[0].expert is not None and (filled != set(range(shape[0])) or rows != shape[0] * shape[1]):
        raise ValueError(
            f"{folder.folder} has tensors for {len(filled)} experts of {target}, {rows} rows in all; "
            f"the model has {shape[0]} of {shape[1]} rows: download it again"
        )


def _natural(name: str) -> list[object]:
    """Sort key in which expert 10 comes after expert 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
