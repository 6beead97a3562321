"""Run a model's own experts while an observer sees what every expert was given and how much the loss cares.

Statistics come from the arguments of the fused experts module (hidden_states, top_k_index, top_k_weights): hooks on
Linear see nothing of fused 3-D experts. Answers are the original module's, bit for bit; each expert is recomputed
alone in fp32 only to observe it, so nothing but the layer's arguments is kept between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    """tokens: int64 (B, T). mask: bool (B, T), False for padding, which is never observed."""

    tokens: Tensor
    mask: Tensor


class Visit(NamedTuple):
    """What one expert did for the n (token, slot) pairs of one forward that are not padding; fp32 unless said.

    gate_up_input: (n, H). down_input: (n, I), the activated values.
    gate_up_stakes: (n, 2I), down_stakes: (n, H): squared derivative of the loss by each output of that projection.
    weights: (n,), routing weights r. sequence: int64 (n,), the batch row each token belongs to.
    """

    layer_index: int
    expert: int
    gate_up_input: Tensor
    gate_up_stakes: Tensor
    down_input: Tensor
    down_stakes: Tensor
    weights: Tensor
    sequence: Tensor


Observer = Callable[[Visit], None]
ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Expert(NamedTuple):
    """One expert's maths in fp32 for n tokens; `activated` is differentiable in `gated` alone."""

    gate_up: Tensor
    down: Tensor
    gated: Tensor
    activated: Tensor


def routed_pairs(index: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, token, slot) for every expert that some token is routed to; ids outside [0, E) are left out."""
    for expert in torch.unique(index).tolist():
        if 0 <= expert < experts:
            token, slot = torch.where(index == expert)
            yield expert, token, slot


def _run_expert(module: nn.Module, expert: int, x: Tensor) -> _Expert:
    gate_up = module.gate_up_proj[expert].detach().float()
    with torch.enable_grad():
        gated = (x @ gate_up.T).detach().requires_grad_()
        activated = module._apply_gate(gated)
    return _Expert(gate_up, module.down_proj[expert].detach().float(), gated, activated)


class _Site(NamedTuple):
    """An experts module under observation, and the batch that is on its way through it."""

    layer_index: int
    module: nn.Module
    original: ExpertsForward
    observe: Observer
    mask: Tensor

    def sequence_of(self, tokens: int) -> Tensor:
        if tokens != self.mask.numel():
            raise ValueError(
                f"MoE layer {self.layer_index} got {tokens} tokens of a batch of {self.mask.numel()}; calibration "
                "needs models that route every position of (B, T) tokens"
            )
        return torch.arange(tokens, device=self.mask.device) // self.mask.shape[1]

    def report(self, expert: int, token: Tensor, *values: Tensor) -> None:
        """Hand over (gate_up_input, gate_up_stakes, down_input, down_stakes, weights) of the pairs not padded."""
        seen = self.mask.reshape(-1)[token]
        if seen.any():
            sequence = self.sequence_of(self.mask.numel())[token][seen]
            self.observe(Visit(self.layer_index, expert, *(v[seen] for v in values), sequence))


class _ObservedExperts(torch.autograd.Function):
    """The original experts; the backward pass recomputes one expert at a time and reports it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, index: Tensor, weights: Tensor, site: _Site) -> Tensor:
        ctx.save_for_backward(hidden, index, weights)
        ctx.site = site
        return site.original(hidden, index, weights)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None, Tensor, None]:
        hidden, index, weights = ctx.saved_tensors
        site: _Site = ctx.site
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weights_gradient = torch.zeros_like(weights, dtype=torch.float32)
        for expert, token, slot in routed_pairs(index, site.module.num_experts):
            x, r = hidden[token].float(), weights[token, slot].float()
            block_gradient = output_gradient[token].float()
            run = _run_expert(site.module, expert, x)
            activated = run.activated.detach()
            weights_gradient[token, slot] = (block_gradient @ run.down * activated).sum(1)
            down_gradient = r[:, None] * block_gradient
            (gate_up_gradient,) = torch.autograd.grad(run.activated, run.gated, down_gradient @ run.down)
            hidden_gradient.index_add_(0, token, gate_up_gradient @ run.gate_up)
            site.report(expert, token, x, gate_up_gradient.square(), activated, down_gradient.square(), r)
        return hidden_gradient.to(hidden.dtype), None, weights_gradient.to(weights.dtype), None


def observe_gradients(
    model: nn.Module,
    experts: Sequence[nn.Module],
    batch: Batch,
    loss: Callable[[Tensor, Batch], Tensor],
    observe: Observer,
) -> None:
    """One forward and one backward pass for activations only; every visited expert is observed once.

    loss: from the logits (B, T, V) and the batch, a scalar. Weights are frozen meanwhile and get no gradient.
    """

    def forward_of(site: _Site) -> ExpertsForward:
        def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            site.sequence_of(len(hidden))
            return _ObservedExperts.apply(hidden, index, weights, site)

        return forward

    with _replaced(model, experts, batch, observe, forward_of), _differentiable_inputs(model), torch.enable_grad():
        loss(_logits(model, batch), batch).backward()


def observe_forward(model: nn.Module, experts: Sequence[nn.Module], batch: Batch, observe: Observer) -> Tensor:
    """One forward pass without gradients; returns the logits (B, T, V).

    Stakes are those of the layer's own output y: d|y|^2 = sum of stakes * (change of each output)^2, to first order.
    For down that is r^2; for gate_up it is r^2 (d act_i)^2 |down[:, i]|^2.
    """

    def forward_of(site: _Site) -> ExpertsForward:
        def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            site.sequence_of(len(hidden))
            for expert, token, slot in routed_pairs(index, site.module.num_experts):
                x, r = hidden[token].float(), weights[token, slot].float()
                run = _run_expert(site.module, expert, x)
                # Channel i of the activation depends on gate_i and up_i alone, so one gradient of the sum has them all.
                (slope,) = torch.autograd.grad(run.activated, run.gated, torch.ones_like(run.activated))
                reach = run.down.square().sum(0).repeat(2)
                squared = r.square()[:, None]
                down_stakes = squared.expand(-1, hidden.shape[1])
                site.report(expert, token, x, squared * slope.square() * reach, run.activated.detach(), down_stakes, r)
            return site.original(hidden, index, weights)

        return forward

    with _replaced(model, experts, batch, observe, forward_of), torch.no_grad():
        return _logits(model, batch)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch.tokens, attention_mask=batch.mask.long(), use_cache=False).logits


@contextmanager
def _replaced(
    model: nn.Module,
    experts: Sequence[nn.Module],
    batch: Batch,
    observe: Observer,
    forward_of: Callable[[_Site], ExpertsForward],
) -> Iterator[None]:
    """The model in eval mode with every experts module's forward replaced; as it was afterwards, whatever happens."""
    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
        for layer_index, module in enumerate(experts):
            site = _Site(layer_index, module, module.forward, observe, batch.mask)
            undo.enter_context(replaced_forward(module, forward_of(site)))
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: ExpertsForward) -> Iterator[None]:
    """The module with another forward; an instance's own forward (a wrapper somebody installed) comes back."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; each module's own mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _differentiable_inputs(model: nn.Module) -> Iterator[None]:
    """Parameters frozen and embedded tokens requiring a gradient: backward then computes activation gradients only."""
    handle = model.get_input_embeddings().register_forward_hook(lambda _m, _a, embedded: embedded.requires_grad_())
    try:
        with frozen(model):
            yield
    finally:
        handle.remove()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """The model with no parameter that gets a gradient; each one's own wish comes back."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
