"""Fill Statistics from a float model: one forward and one backward pass per batch, or forward passes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from pagedweight.calibration.capture import Batch, observe_forward, observe_gradients, replaced_forward
from pagedweight.calibration.statistics import MOMENT_COLUMNS, Statistics
from pagedweight.discovery import ExpertsModule
from pagedweight.discovery_storage import FusedStorage

METHODS = ("gradient", "forward")
LABELS = ("sampled", "text")
STATISTICS_WINDOWS = 256  # of a text, at most: more hardly change a second moment, and tuning wants many more
PROBE_SHARE = 0.05  # noise per RMS of a layer's output: large beside fp32 rounding, small enough to be second order


def collect(
    model: nn.Module,
    found: Sequence[ExpertsModule],
    batches: Iterable[Batch],
    *,
    method: str = "gradient",
    labels: str = "sampled",
    seed: int = 0,
    moment_columns: int = MOMENT_COLUMNS,
    advance: Callable[[int], None] = lambda sequences: None,
) -> Statistics:
    """Statistics of the model's routed experts over the batches; memory does not depend on how many there are.

    found: the experts, as discovery.find_experts gives them.
    method: "gradient" (one backward pass of activations), or "forward" where autograd does not fit: layer outputs then
    stand in for the loss, weighed by one noise probe per layer on the first batch.
    labels: what the gradient is of: the text's own next tokens ("text"), or tokens drawn from the model's prediction
    ("sampled"), whose squared gradients estimate the divergence from the model's own answer without bias.
    advance: called with the number of sequences of each finished batch.
    ValueError when nothing was observed or something was not finite.
    """
    if method not in ("gradient", "forward") or labels not in LABELS:
        raise ValueError(
            f"method {method!r} with labels {labels!r}; methods are gradient, forward, labels are {', '.join(LABELS)}"
        )
    unusual = next((experts.path for experts in found if not experts.is_plain), None)
    if unusual is not None:
        raise ValueError(
            f"{unusual} keeps its experts with biases, without a gate or in a form of its own, which calibration does "
            "not follow yet; quantize at level 'fast'"
        )
    refuse_other_forms(found)
    experts = [experts.module for experts in found]
    statistics = Statistics.zeros([experts.shape for experts in found], experts, moment_columns=moment_columns)
    generator, first = None, None
    for batch in batches:
        first = first or batch
        if method == "gradient":
            generator = generator or torch.Generator(batch.tokens.device).manual_seed(seed)
            objective = _sampled_loss(generator) if labels == "sampled" else text_loss
            observe_gradients(model, experts, batch, objective, statistics.observe)
        else:
            observe_forward(model, experts, batch, statistics.observe)
        statistics.tokens += int(batch.mask.sum())
        statistics.sequences += len(batch.tokens)
        advance(len(batch.tokens))
    if first is None:
        raise ValueError("calibration got no sequences; give at least one")
    statistics.check()
    if method == "forward":
        _weigh_layers(model, experts, first, statistics, seed)
    return statistics


def check_method(method: str, labels: str) -> None:
    """ValueError unless both are known to `collect`."""
    if method not in METHODS or labels not in LABELS:
        raise ValueError(
            f"method is {method!r} with labels {labels!r}; methods are {', '.join(METHODS)}, labels {', '.join(LABELS)}"
        )


def refuse_other_forms(found: Sequence[ExpertsModule]) -> None:
    """ValueError for experts that are not recomputed here as they compute themselves."""
    for experts in found:
        plain = experts.storage == FusedStorage() and experts.block is None and experts.shape.gated
        if not plain or experts.biases():
            raise ValueError(
                f"{experts.path} is a {type(experts.module).__name__}, and calibration knows only experts with a gate, "
                "without biases, and with matrices of outputs x inputs; quantize this model at level fast without text"
            )


def text_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Summed negative log-likelihood of the next tokens, in nats."""
    counted = batch.mask[:, 1:] & batch.mask[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits[:, :-1][counted].float(), batch.tokens[:, 1:][counted], reduction="sum"
    )


def _sampled_loss(generator: torch.Generator) -> Callable[[Tensor, Batch], Tensor]:
    def loss(logits: Tensor, batch: Batch) -> Tensor:
        seen = logits[batch.mask].float()
        drawn = torch.multinomial(seen.detach().softmax(-1), 1, generator=generator)[:, 0]
        return torch.nn.functional.cross_entropy(seen, drawn, reduction="sum")

    return loss


@torch.no_grad()
def _weigh_layers(
    model: nn.Module, experts: Sequence[nn.Module], batch: Batch, statistics: Statistics, seed: int
) -> None:
    """Scale each layer's sums from squared output error to nats, by the divergence that known noise in it causes."""

    def log_probabilities() -> Tensor:
        logits = model(input_ids=batch.tokens, attention_mask=batch.mask.long(), use_cache=False).logits
        return logits[batch.mask].float().log_softmax(-1)

    clean = log_probabilities()
    for module, layer in zip(experts, statistics.layers, strict=True):
        generator = torch.Generator(batch.tokens.device).manual_seed(seed)
        energies: list[Tensor] = []
        with replaced_forward(module, _noisy(module.forward, generator, batch.mask, energies)):
            noisy = log_probabilities()
        divergence = torch.nn.functional.kl_div(noisy, clean, log_target=True, reduction="sum").double().clamp_min(0)
        # Half the Fisher form is the divergence: F of a unit of squared output error is twice nats per energy.
        factor = float(2 * divergence / sum(e.sum() for e in energies).clamp_min(1e-30))
        for block in layer.blocks:
            block.scale(factor)


def _noisy(
    forward: Callable[..., Tensor], generator: torch.Generator, mask: Tensor, energies: list[Tensor]
) -> Callable[..., Tensor]:
    def noisy(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = forward(hidden, index, weights)
        noise = torch.randn(output.shape, generator=generator, device=output.device)
        noise *= PROBE_SHARE * output.float().square().mean().sqrt() * mask.reshape(-1, 1)
        energies.append(noise.double().square().sum())
        return output + noise.to(output.dtype)

    return noisy
