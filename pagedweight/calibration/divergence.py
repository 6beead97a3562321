"""How far a model's next-token distribution is from the one it had: perplexity, KL divergence, top-1 agreement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedweight.calibration.capture import Batch
from pagedweight.calibration.text import Windows


class Divergence(NamedTuple):
    """Per window, float64 (n,): mean next-token loss in nats, mean KL(reference || model) in nats, top-1 agreement."""

    loss: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray


class Reference(NamedTuple):
    """The unquantized model's answers to some windows, kept as inputs of its output head. hidden: (n, T, H)."""

    windows: Windows
    hidden: Tensor
    rows: int

    def one(self, index: int) -> Reference:
        """Of a single window."""
        windows, here = self.windows, slice(index, index + 1)
        own = windows._replace(tokens=windows.tokens[here], mask=windows.mask[here])
        return Reference(own, self.hidden[here], 1)


@torch.no_grad()
def take_reference(model: nn.Module, windows: Windows, *, rows: int = 4) -> Reference:
    """Run the model as it is now. rows: windows per forward, here and whenever it is compared with.

    The output head must stay as it is: it turns the kept hidden states back into logits. ValueError where it does not.
    """
    kept = []
    for batch in windows.batches(rows, _device(model)):
        logits, hidden = last_hidden(model, batch)
        if not kept and not torch.allclose(head_logits(model, hidden), logits.float(), rtol=1e-3, atol=1e-3):
            raise ValueError(f"{type(model).__name__} changes its output head's logits in a way that is not known here")
        kept.append(hidden.cpu())
    return Reference(windows, torch.cat(kept), rows)


@torch.no_grad()
def diverge(model: nn.Module, reference: Reference, scored: Tensor | None = None) -> Divergence:
    """Compare the model as it is now with the reference.

    scored: bool (n, T), tokens whose prediction counts, at least one in each window; by default all that are unmasked,
    and for KL and agreement what the last of them predicts, too.
    """
    parts = []
    at = reference.windows.mask if scored is None else scored.roll(-1, 1)
    batches = reference.windows.batches(reference.rows, _device(model))
    for batch, hidden, own in zip(
        batches, reference.hidden.split(reference.rows), at.split(reference.rows), strict=True
    ):
        logits = last_hidden(model, batch)[0].float()
        expected = head_logits(model, hidden.to(logits.device))
        rows = zip(batch.tokens, batch.mask, own.to(logits.device), logits, expected, strict=True)
        parts.extend(window_divergence(*row) for row in rows)
    return Divergence(*np.array(parts, dtype=np.float64).T)


def window_divergence(
    tokens: Tensor, mask: Tensor, at: Tensor, logits: Tensor, expected: Tensor
) -> tuple[float, float, float]:
    """Loss, KL and agreement of one window.

    tokens, mask: (T,). logits, expected: fp32 (T, V), ours and the reference's.
    at: bool (T,), positions whose prediction counts, of unmasked tokens.
    """
    logits, expected = logits[at].log_softmax(-1), expected[at].log_softmax(-1)
    followed = mask.roll(-1) & (torch.arange(len(mask), device=mask.device) < len(mask) - 1)
    loss = functional.nll_loss(logits[followed[at]], tokens.roll(-1)[at & followed])
    kl = functional.kl_div(logits, expected, log_target=True, reduction="sum") / len(logits)
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    return loss.item(), kl.item(), agreement.item()


def head_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """fp32 logits of the output head, capped where the model's configuration says so."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _device(model: nn.Module) -> torch.device:
    return model.get_output_embeddings().weight.device


def last_hidden(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and what the output head made them from."""
    with _recorded_input(model.get_output_embeddings()) as seen:
        logits = model(input_ids=batch.tokens, attention_mask=batch.mask.long(), use_cache=False).logits
    return logits, seen[-1]


@contextmanager
def _recorded_input(module: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()
