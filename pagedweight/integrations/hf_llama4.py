"""Llama 4's block around the experts, which runs every expert densely, called with ids and weights instead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def routed_forward(block: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What the block's own forward gives, from paged experts that run only what was chosen: one expert per token.

    The router's score scales what goes into an expert, not what comes out; the scores of all other experts are 0.
    """

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = block.router(hidden_states)
        score, expert = scores.max(dim=1, keepdim=True)
        routed = block.experts(hidden_states * score, expert, torch.ones_like(score))
        return block.shared_expert(hidden_states) + routed, logits

    return forward
