"""Writes a patched model to a folder: what pagedweight.save and the model's own save_pretrained do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pagedweight.checkpoint import FOLDER, CheckpointWriter
from pagedweight.patching_devices import SpreadModel
from pagedweight.patching_model import PagedModel
from pagedweight.saving_source import refuse_dense, save_rest
from pagedweight.shared_experts import refuse_folded

# Arguments of transformers' save_pretrained that concern only the files beside the pages.
PASSED_ON = ("max_shard_size",)


def save(model: nn.Module, directory: str | Path, **kwargs: Any) -> None:
    """Write a patched model with every plane and table, wherever they are now, and its policy.

    What load() makes of it equals this model at the same widths, bit for bit.
    kwargs: max_shard_size, for transformers' part of the files; a model of another kind has its pages written alone.
    ValueError for another argument, for a model that is not patched and for a folder with a dense model, RuntimeError
    for a model that is closed.
    """
    paged = getattr(model, "pagedweight", None)
    if not isinstance(paged, PagedModel | SpreadModel):
        raise ValueError(
            "the model is not patched; quantize it into a folder with pagedweight.quantize(model, directory)"
        )
    if paged.closed:
        raise RuntimeError("the model's runtime is closed and its pages are gone, so it cannot be saved; load it again")
    refuse_folded(model)
    unknown = sorted(kwargs.keys() - set(PASSED_ON))
    if unknown:
        raise ValueError(
            f"a patched model cannot be saved with {', '.join(unknown)}; it takes {', '.join(PASSED_ON)}, and to share "
            "it, upload the folder"
        )
    directory = Path(directory)
    refuse_dense(directory)
    writer = CheckpointWriter(directory, paged.layout, recipe=paged.recipe)
    save_rest(model, directory, model.state_dict(), **kwargs)
    for block, packed in paged.blocks():
        writer.add(block, packed)
    paged.policy.save(directory / FOLDER)
    writer.finish()


def saver(model: nn.Module) -> Callable[..., None]:
    """Stands in for the model's save_pretrained, which would leave out the experts without a word."""
    # The model holds this function: a reference back would keep its memory until a garbage collection.
    own = weakref.ref(model)

    def save_pretrained(save_directory: str | Path, **kwargs: Any) -> None:
        if not kwargs.get("push_to_hub", True):
            del kwargs["push_to_hub"]
        save(own(), save_directory, **kwargs)

    return save_pretrained
