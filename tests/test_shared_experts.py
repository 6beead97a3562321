"""Shared experts among the routed ones: the same answers, paged like them, and put back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.shared_experts import fold_shared_experts, is_folded, unfold_shared_experts
from tests.hf_models import mixtral_m8, qwen2_moe_q60, tokens
from tests.support import assert_close


def model_with_shared(width: int = 88):
    return qwen2_moe_q60(shared_expert_intermediate_size=width).eval()


@torch.no_grad()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


def test_the_model_answers_as_before_and_unfolding_gives_every_weight_back() -> None:
    model, ids = model_with_shared(), tokens(2, 12)
    before, state = logits(model, ids), {name: t.clone() for name, t in model.state_dict().items()}
    folded = fold_shared_experts(model)
    assert is_folded(model)
    assert not any("shared_expert." in name for name in model.state_dict())
    assert_close(logits(model, ids), before)
    unfold_shared_experts(folded)
    assert not is_folded(model)
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], own) for name, own in state.items())
    assert torch.equal(logits(model, ids), before)


def test_a_patched_model_pages_them_and_counts_their_gate_as_mass() -> None:
    model, ids = model_with_shared(), tokens(2, 12)
    before = logits(model, ids)
    folded = fold_shared_experts(model)
    pagedweight.patch(model, config=RuntimeConfig(budget_bytes=2**25))
    runtime = model.pagedweight
    assert runtime.layout.moe_layers[0].experts == 62
    runtime.set_bits(runtime.layout.parent_width)
    near = logits(model, ids)
    mass = runtime.stats.mass[0, 0].clone()
    assert (mass[60:] > 0).all()
    assert mass[60] == pytest.approx(mass[61].item())
    runtime.set_bits(runtime.layout.floor_width)
    far = logits(model, ids)
    error = [float((got - before).abs().max() / before.abs().max()) for got in (near, far)]
    assert error[0] < 0.05 < error[1]
    pagedweight.unpatch(model)
    unfold_shared_experts(folded)
    assert_close(logits(model, ids), near)


@pytest.mark.parametrize("model", [model_with_shared(80), mixtral_m8().eval()], ids=["no multiple", "none"])
def test_what_cannot_be_folded_is_refused_and_left_alone(model) -> None:
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="as it is"):
        fold_shared_experts(model)
    assert all(torch.equal(model.state_dict()[name], own) for name, own in state.items())


def test_a_block_that_uses_its_shared_expert_otherwise_is_refused_and_left_alone() -> None:
    model, ids = model_with_shared(), tokens(1, 6)
    block = model.model.layers[-1].mlp
    kind = type(block)
    twice = type("Twice", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    block.__class__ = twice
    before = logits(model, ids)
    with pytest.raises(ValueError, match="in a way that is not known here"):
        fold_shared_experts(model)
    assert torch.equal(logits(model, ids), before)
    assert not is_folded(model)


def test_memory_that_runs_out_while_folding_leaves_every_layer_as_it_was() -> None:
    model = model_with_shared()
    state = {name: t.clone() for name, t in model.state_dict().items()}

    def run_out(experts, args) -> None:
        if experts.num_experts > 60:
            raise torch.OutOfMemoryError("no room for the wider layer")

    model.model.layers[1].mlp.experts.register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError, match="wider layer"):
        pagedweight.patch(model, shared_experts=True)
    assert not is_folded(model)
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], own) for name, own in state.items())


def test_a_folded_model_is_not_saved(tmp_path) -> None:
    model = model_with_shared()
    fold_shared_experts(model)
    with pytest.raises(ValueError, match="shared experts"):
        pagedweight.quantize(model, tmp_path / "one")
    pagedweight.patch(model)
    with pytest.raises(ValueError, match="shared experts"):
        pagedweight.save(model, tmp_path / "two")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert np.isfinite(logits(model, tokens(1, 4)).numpy()).all()
