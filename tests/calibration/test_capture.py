"""Observing experts: answers unchanged, gradients right, the model as it was afterwards."""

from __future__ import annotations

import pytest
import torch

from pagedweight.calibration.capture import Visit, observe_forward, observe_gradients
from pagedweight.calibration.collect import refuse_other_forms, text_loss
from pagedweight.discovery import find_experts
from tests.calibration.support import batch, modules_of
from tests.hf_families import family_model
from tests.hf_models import FAMILIES, mixtral_m8


def condition(model: torch.nn.Module) -> tuple:
    """Whatever an observer could leave behind."""
    modules = dict(model.named_modules())
    return (
        [name for name, m in modules.items() if "forward" in vars(m)],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules.values()],
        [m.training for m in modules.values()],
        [(p.requires_grad, p.grad is None) for p in model.parameters()],
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )


def assert_same_condition(before: tuple, after: tuple) -> None:
    assert before[:4] == after[:4]
    assert all(torch.equal(before[4][name], after[4][name]) for name in before[4])


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_models_own(family: str) -> None:
    model, given = FAMILIES[family](), batch(2, 5)
    seen = []

    def loss(logits: torch.Tensor, given: object) -> torch.Tensor:
        seen.append(logits.detach())
        return logits.float().square().sum()

    observe_gradients(model, modules_of(model), given, loss, lambda visit: None)
    seen.append(observe_forward(model, modules_of(model), given, lambda visit: None))
    with torch.no_grad():
        expected = model(input_ids=given.tokens, attention_mask=given.mask.long(), use_cache=False).logits
    assert torch.equal(seen[0], expected)
    assert torch.equal(seen[1], expected)


@pytest.mark.parametrize("observe", [observe_gradients, observe_forward])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_restored(observe, fails: bool) -> None:
    model = mixtral_m8()
    model.train()
    model.model.layers[1].eval()
    next(model.parameters()).requires_grad_(False)
    first = modules_of(model)[0]
    first.forward = first.forward  # a wrapper somebody else installed on the instance

    def watch(visit: Visit) -> None:
        if fails:
            raise RuntimeError("the observer fails")

    arguments = [model, modules_of(model), batch(2, 4)]
    arguments += [text_loss, watch] if observe is observe_gradients else [watch]
    before, wrapper = condition(model), vars(first)["forward"]
    if fails:
        with pytest.raises(RuntimeError, match="the observer fails"):
            observe(*arguments)
    else:
        observe(*arguments)
    assert_same_condition(before, condition(model))
    assert vars(first)["forward"] is wrapper


def test_stakes_are_squared_weight_gradients() -> None:
    """With one token in all, an expert's weight gradient is g x^T, which autograd computes on its own."""
    model, given = mixtral_m8(), batch(1, 1)
    visits: list[Visit] = []
    loss = lambda logits, _: logits[..., 7].sum()  # noqa: E731
    modules = modules_of(model)
    observe_gradients(model, modules, given, loss, visits.append)
    loss(model(input_ids=given.tokens).logits, given).backward()
    assert len(visits) == 2 * 2
    for visit in visits:
        module = modules[visit.layer_index]
        for weight, x, stakes in (
            (module.gate_up_proj, visit.gate_up_input, visit.gate_up_stakes),
            (module.down_proj, visit.down_input, visit.down_stakes),
        ):
            fisher = stakes[0][:, None] * x[0].square()
            torch.testing.assert_close(fisher, weight.grad[visit.expert].square(), rtol=1e-3, atol=1e-12)


def test_forward_stakes_are_output_errors() -> None:
    """A small change of one expert's outputs moves the layer's output by what the stakes say."""
    model, given = mixtral_m8(), batch(1, 1)
    visits: list[Visit] = []
    module = modules_of(model)[0]
    observe_forward(model, [module], given, visits.append)
    visit = visits[0]
    x, r = visit.gate_up_input.double(), visit.weights.double()
    gate_up, down = (w[visit.expert].double() for w in (module.gate_up_proj, module.down_proj))
    for channel in (0, 5, 100, 191):
        nudge = torch.zeros(192, dtype=torch.float64)
        nudge[channel] = 1e-6
        outputs = [r * module._apply_gate(x @ gate_up.T + step) @ down.T for step in (nudge, -nudge)]
        moved = ((outputs[0] - outputs[1]) / 2e-6).square().sum()
        torch.testing.assert_close(visit.gate_up_stakes[0, channel].double(), moved, rtol=1e-3, atol=1e-12)
    torch.testing.assert_close(visit.down_stakes[0], r.float().square().expand(64))


def test_padding_is_never_observed() -> None:
    model = mixtral_m8()
    whole, padded = batch(1, 6), batch(1, 9, padding=3)
    padded.tokens[:, :6] = whole.tokens
    recorded: list[list[Visit]] = []
    for given in (whole, padded):
        visits: list[Visit] = []
        observe_gradients(model, modules_of(model), given, text_loss, visits.append)
        recorded.append(visits)
    assert sum(len(v.weights) for v in recorded[1]) == 2 * 6 * 2
    for without, with_padding in zip(*recorded, strict=True):
        for a, b in zip(without[2:], with_padding[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-9)


def test_sequences_are_told_apart() -> None:
    visits: list[Visit] = []
    model = mixtral_m8()
    observe_forward(model, modules_of(model), batch(3, 4, padding=1), visits.append)
    pairs = torch.cat([v.sequence for v in visits if v.layer_index == 0])
    assert torch.bincount(pairs).tolist() == [2 * 3, 2 * 4, 2 * 4]


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "dbrx", "llama4_text"])
def test_experts_of_another_form_are_refused_and_not_misread(family: str) -> None:
    """Biases and interleaved rows, no gate, matrices kept apart, a block that does not hand over ids and weights."""
    with pytest.raises(ValueError, match="quantize this model at level fast without text"):
        refuse_other_forms(find_experts(family_model(family)))
    refuse_other_forms(find_experts(mixtral_m8()))
