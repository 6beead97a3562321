"""How far a model's answers move when its experts hold the values of a plan of widths; any window may have its own.

The values of every linear-block at every width lie side by side on the device, so a plan costs no copy: each (token,
expert) pair is multiplied with the weights of the width that its window's plan gives that expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pagedweight.bitplane import dequantize
from pagedweight.calibration.capture import replaced_forward
from pagedweight.calibration.text import Windows
from pagedweight.discovery import ExpertsModule
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection


class Answers(NamedTuple):
    """A text's windows and the unquantized model's next-token distributions P for them, as moments.

    KL(P || Q) of a position is sum_v P_v log P_v - h_Q . (sum_v P_v W_v) + logsumexp(W h_Q), with W the output head's
    rows: all that P needs is a vector and a number, kept once.
    tokens: int64 (n, T). center: float64 (n, T, H), sum_v P_v W_v. negentropy: float64 (n, T), sum_v P_v log P_v.
    top: int64 (n, T), the likeliest next token. rows: windows per forward. first: figures are of positions from here.
    """

    tokens: Tensor
    center: Tensor
    negentropy: Tensor
    top: Tensor
    rows: int
    first: int = 0

    def repeated(self, times: int) -> Answers:
        """All windows, and all of them again, so that several plans can be judged at once."""
        parts = (self.tokens, self.center, self.negentropy, self.top)
        return Answers(*(part.repeat(times, *[1] * (part.ndim - 1)) for part in parts), self.rows, self.first)


class Figures(NamedTuple):
    """Means over each window's positions, float64 (n,): next-token loss and KL in nats, top-1 agreement."""

    loss: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray


@torch.no_grad()
def take_answers(model: nn.Module, windows: Windows, *, rows: int, first: int = 0) -> Answers:
    """The model's answers as it is now. ValueError for a masked window, or a head whose logits are not W h alone."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    if getattr(head, "bias", None) is not None or getattr(config, "final_logit_softcapping", None) is not None:
        raise ValueError(
            f"the output head of {type(model).__name__} is not linear; its divergence is not measured here"
        )
    if not windows.mask.all():
        raise ValueError("a window is not full; give more text or fewer windows")
    tokens = windows.tokens.to(head.weight.device)
    parts = []
    for chunk in tokens.split(rows):
        hidden, logits = _run(model, chunk)
        center = torch.stack([window.double().softmax(-1) @ head.weight.double() for window in logits])
        # sum_v P_v log P_v, by the same sums that Q will go through: their rounding cancels, and KL(P || P) is 0.
        negentropy = (hidden.double() * center).sum(-1) - logits.logsumexp(-1).double()
        parts.append((center, negentropy, logits.argmax(-1)))
    return Answers(tokens, *map(torch.cat, zip(*parts, strict=True)), rows, first)


def _run(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden, model.get_output_embeddings()(hidden).float()


class Judge:
    """Measures plans of a model from its packed linear-blocks. Plans are width indices; W stands for unquantized."""

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[ExpertsModule],
        layout: Layout,
        block: Callable[[BlockId], PackedBlock],
    ) -> None:
        self._model, self._found, self._layout = model, found, layout
        self._stacks = [[_stack(experts, layout, projection, block) for projection in Projection] for experts in found]

    @torch.no_grad()
    def figures(self, answers: Answers, index: np.ndarray) -> Figures:
        """index: (R,) for every window, or (n, R), a plan for each."""
        device = answers.tokens.device
        plans = torch.as_tensor(np.broadcast_to(index, (len(answers.tokens), self._layout.rows)).copy(), device=device)
        parts = []
        for at in range(0, len(answers.tokens), answers.rows):
            chosen = slice(at, at + answers.rows)
            with self._planned(plans[chosen]):
                hidden, logits = _run(self._model, answers.tokens[chosen])
            parts.append(_compare(answers, chosen, hidden, logits))
        return Figures(*(torch.cat(values).cpu().numpy() for values in zip(*parts, strict=True)))

    @contextmanager
    def _planned(self, plans: Tensor) -> Iterator[None]:
        with ExitStack() as undo:
            for layer_index, experts in enumerate(self._found):
                first, count = self._layout.first_row(layer_index), 2 * experts.shape.experts
                own = plans[:, first : first + count].view(len(plans), experts.shape.experts, 2)
                forward = _forward_of(experts.module, self._stacks[layer_index], own)
                undo.enter_context(replaced_forward(experts.module, forward))
            yield


def _compare(answers: Answers, chosen: slice, hidden: Tensor, logits: Tensor) -> Figures:
    first = answers.first
    norm = logits.logsumexp(-1).double()
    kl = answers.negentropy[chosen] - (hidden.double() * answers.center[chosen]).sum(-1) + norm
    targets = logits[:, :-1].gather(-1, answers.tokens[chosen, 1:, None])[..., 0]
    agreement = (logits.argmax(-1) == answers.top[chosen]).double()
    return Figures((norm[:, :-1] - targets)[:, first:].mean(-1), kl[:, first:].mean(-1), agreement[:, first:].mean(-1))


def _stack(
    experts: ExpertsModule, layout: Layout, projection: Projection, block: Callable[[BlockId], PackedBlock]
) -> Tensor:
    """(E, W + 1, N, K) fp32: every expert's values at every width, then its own."""
    weight = (experts.module.gate_up_proj, experts.module.down_proj)[projection].detach()
    out = weight.new_empty(len(weight), len(layout.widths) + 1, *weight.shape[1:])
    for expert, own in enumerate(weight):
        packed = block(BlockId(experts.shape.layer, expert, projection))
        for w, bits in enumerate(layout.widths):
            out[expert, w] = dequantize(packed, bits)
        out[expert, -1] = own
    return out


def _forward_of(
    module: nn.Module, stacks: Sequence[Tensor], plans: Tensor
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts under plans (n, E, 2), one for each window of the batch."""
    gate_up, down = stacks

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        expert = index.reshape(-1)
        window = torch.arange(len(expert), device=expert.device) // (len(expert) // len(plans))
        width = plans[window, expert]
        x = hidden.repeat_interleave(index.shape[1], 0)
        activated = module._apply_gate(_grouped(x, expert, width[:, 0], gate_up))
        y = _grouped(activated, expert, width[:, 1], down) * weights.reshape(-1, 1)
        return y.view(*index.shape, -1).sum(1)

    return forward


def _grouped(x: Tensor, expert: Tensor, width: Tensor, stack: Tensor) -> Tensor:
    """Each row of x (p, K) times the weights of its own expert and width, (p, N)."""
    experts, widths = stack.shape[:2]
    key = expert * widths + width
    order = key.argsort()
    counts = torch.bincount(key, minlength=experts * widths).tolist()
    weights = stack.flatten(0, 1)
    parts = [rows @ weights[group].T for group, rows in enumerate(x[order].split(counts)) if len(rows)]
    out = x.new_empty(len(x), stack.shape[2])
    out[order] = torch.cat(parts)
    return out
