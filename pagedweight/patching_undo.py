"""Takes a patch back: dense weights from pages, and what a patch that failed half-way has left of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn

from pagedweight.discovery_experts import ExpertsModule
from pagedweight.layout import Projection
from pagedweight.patching_fill import Filling
from pagedweight.patching_model import PagedModel
from pagedweight.patching_pages import PageStore


class LostExperts(nn.Module):
    """Where weights were that could not be given back: neither run nor saved, so that nobody goes on without them."""

    def __init__(self, sentence: str) -> None:
        super().__init__()
        self._sentence = sentence

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self._sentence)

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self._sentence)


def give_back(store: PageStore, experts: ExpertsModule, device: torch.device) -> None:
    """Give a module that lost its weights the parent-width ones; nothing where it has them."""
    if not experts.has_weights:
        bits = store.layout.parent_width
        # In the module's own dtype from the start: fp32 would need twice its room, on the host and on the device.
        dense = [store.dense(experts.shape, projection, bits, experts.dtype) for projection in Projection]
        experts.put_weights(*(weight.to(device) for weight in dense))


def undo(model: nn.Module, begun: Sequence[Filling], parts: Sequence[PagedModel]) -> None:
    """After a patch that failed: its weights come back to the model, its threads, files and host memory end.

    RuntimeError when weights cannot be given back: the model has LostExperts in their places then.
    """
    with ExitStack() as closing:
        for one in begun:
            closing.callback(one.store.host.close)
        for part in parts:
            closing.callback(part.close)
        done = [(one, experts) for one in begun for experts in one.done]
        try:
            for one, experts in done:
                give_back(one.store, experts, one.share.device)
        except BaseException as error:
            sentence = _replace_lost(model, (experts for _, experts in done))
            if isinstance(error, Exception):
                raise RuntimeError(sentence) from error
            raise


def is_lost(model: nn.Module) -> bool:
    """Whether a failed patch has left it without some of its experts."""
    return any(isinstance(module, LostExperts) for module in model.modules())


def _replace_lost(model: nn.Module, all_experts: Iterable[ExpertsModule]) -> str:
    lost = [experts for experts in all_experts if not experts.has_weights]
    sentence = (
        f"this {type(model).__name__} has lost the expert weights of {', '.join(one.path for one in lost[:3])}"
        f"{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}: patching it failed, and so did giving them back; "
        "load the model again"
    )
    for experts in lost:
        model.set_submodule(experts.path, LostExperts(sentence))
    return sentence
