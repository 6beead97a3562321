"""Perplexity and KL divergence on the held-out text that ships with the package.

The bf16 experts do not ship. What ships is the bf16 model's last hidden state at every held-out position: its output
head is tied to the embedding, which is not quantized, so head(hidden) gives back the bf16 model's whole next-token
distribution and the divergence is exact over the vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.nn import functional

WINDOW_TOKENS = 512  # the demo model was trained on windows of this length and degrades beyond


def cache_argument(model: torch.nn.Module) -> str:
    """The name under which a model takes its KV cache, which transformers changed in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class HeldOut(NamedTuple):
    """tokens: int64 (windows, T). hidden: fp16 (windows, T, H), the bf16 model's output-head input at each token."""

    tokens: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def load(cls, folder: Path) -> HeldOut:
        tensors = load_file(folder / "reference.safetensors")
        return cls(tensors["tokens"].long(), tensors["hidden"])

    def first(self, windows: int) -> HeldOut:
        return HeldOut(self.tokens[:windows], self.hidden[:windows])


class Quality(NamedTuple):
    """perplexity: of the text itself. kl_nats: mean KL(bf16 || this model) of the next-token distribution."""

    perplexity: float
    kl_nats: float


class Meter:
    """Sums the two figures over the positions it is given."""

    def __init__(self, model: torch.nn.Module, text: HeldOut) -> None:
        self._head = model.get_output_embeddings().weight
        self._text = text
        self._loss = self._divergence = 0.0
        self._targets = self._positions = 0

    def add(self, window: int, start: int, logits: torch.Tensor) -> None:
        """Count logits (T, V) of the positions start..start+T of a window."""
        stop = start + len(logits)
        log_q = functional.log_softmax(logits.float(), dim=-1)
        log_p = functional.log_softmax(self.reference_logits(window, start, stop), dim=-1)
        self._divergence += functional.kl_div(log_q, log_p, log_target=True, reduction="sum").item()
        self._positions += len(logits)
        targets = self._text.tokens[window, start + 1 : stop + 1]
        self._loss += functional.nll_loss(log_q[: len(targets)], targets, reduction="sum").item()
        self._targets += len(targets)

    def reference_logits(self, window: int, start: int, stop: int) -> torch.Tensor:
        """The bf16 model's logits (T, V) fp32 of the positions start..stop of a window."""
        hidden = self._text.hidden[window, start:stop].to(self._head.dtype)
        return (hidden @ self._head.T).float()

    def quality(self) -> Quality:
        return Quality(math.exp(self._loss / self._targets), self._divergence / self._positions)


@torch.no_grad()
def of_reference(model: torch.nn.Module, text: HeldOut) -> Quality:
    """Quality of the bf16 model itself: its perplexity, and a divergence of zero."""
    meter = Meter(model, text)
    for window, tokens in enumerate(text.tokens):
        meter.add(window, 0, meter.reference_logits(window, 0, len(tokens)))
    return meter.quality()


@torch.no_grad()
def whole_windows(model: torch.nn.Module, text: HeldOut, advance: Callable[[], None]) -> Quality:
    """Quality with each window read in one forward, without a cache; `advance` is called after each window."""
    meter = Meter(model, text)
    for window, tokens in enumerate(text.tokens):
        meter.add(window, 0, model(tokens[None], use_cache=False).logits[0])
        advance()
    return meter.quality()


def chunked_windows(
    model: torch.nn.Module, text: HeldOut, new_cache: Callable[[], Any], chunk_tokens: int, meter: Meter
) -> Iterator[int]:
    """Read the windows a chunk at a time, each through a cache of its own; yields the window's tokens so far."""
    name = cache_argument(model)
    for window, tokens in enumerate(text.tokens):
        cache = new_cache()
        for start in range(0, len(tokens), chunk_tokens):
            chunk = tokens[start : start + chunk_tokens]
            with torch.no_grad():
                meter.add(window, start, model(chunk[None], **{name: cache}).logits[0])
            yield start + len(chunk)
        cache.release()
