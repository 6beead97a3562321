"""What is left of a model when patching or unpatching fails half-way: all of it, or one sentence."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.discovery import find_experts
from pagedweight.experts import PagedExperts
from pagedweight.patching import assemble
from pagedweight.patching_pages import PageStore
from tests.hf_models import mixtral_m8, qwen2_moe_q60, tokens


def small(**changes) -> PreTrainedModel:
    """Two experts, quick to quantize."""
    return mixtral_m8(num_local_experts=2, num_experts_per_tok=1, intermediate_size=32, **changes)


def without_room_for(layer: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Dense weights of one layer can be made no more."""

    def dense(store: PageStore, shape, *rest, made=PageStore.dense):
        if shape.layer == layer:
            raise error
        return made(store, shape, *rest)

    monkeypatch.setattr(PageStore, "dense", dense)


def damage(experts: nn.Module) -> None:
    """No such weights can be quantized."""
    experts.down_proj.data[1, 0, 0] = torch.inf


def test_weights_that_cannot_be_given_back_are_a_sentence_then_and_at_every_forward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = small(num_hidden_layers=3)
    damage(model.model.layers[2].mlp.experts)
    without_room_for(1, monkeypatch, MemoryError("no room"))
    says = r"^this MixtralForCausalLM has lost the expert weights of model\.layers\.1\.mlp\.experts: .*load the model"
    with pytest.raises(RuntimeError, match=says) as failed:
        pagedweight.patch(model)
    assert isinstance(failed.value.__cause__, MemoryError)
    assert isinstance(failed.value.__cause__.__context__, ValueError), "why it was patched no further"
    with pytest.raises(RuntimeError, match=says):
        model(tokens(1, 4))
    with pytest.raises(RuntimeError, match=says):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has lost experts in a patch that failed; load it again"):
        pagedweight.patch(model)


def test_an_interrupt_while_weights_are_given_back_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    damage(model.model.layers[1].mlp.experts)
    without_room_for(0, monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        pagedweight.patch(model)
    with pytest.raises(RuntimeError, match=r"has lost the expert weights of model\.layers\.0\.mlp\.experts"):
        model(tokens(1, 4))


def test_shared_experts_that_were_folded_do_not_hide_what_was_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = qwen2_moe_q60(num_experts=4, shared_expert_intermediate_size=88)
    without_room_for(0, monkeypatch, MemoryError())
    with pytest.raises(RuntimeError, match="has lost the expert weights of"):
        pagedweight.patch(model, shared_experts=True, config=RuntimeConfig(trace_path=str(tmp_path)))


def test_no_thread_and_no_file_outlives_weights_that_cannot_be_given_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second device's trace cannot be written, when the first one's runtime, its thread and its trace are there."""
    (tmp_path / "trace.1").mkdir()
    without_room_for(0, monkeypatch, MemoryError())
    model, threads = mixtral_m8(), threading.active_count()
    devices = [torch.device("cpu"), torch.device("cpu:0")]
    config = RuntimeConfig(budget_bytes=2**22, background_rows=0, trace_path=str(tmp_path / "trace"))
    with pytest.raises(RuntimeError, match="has lost the expert weights of") as failed:
        assemble(model, find_experts(model), devices, None, None, config)
    assert failed.tb, "kept, as a notebook keeps it: what its frames hold is not collected"
    assert threading.active_count() == threads
    assert tmp_path / "trace.0" not in [
        path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
    ]


@torch.no_grad()
def test_a_model_that_takes_no_paged_experts_keeps_its_own() -> None:
    class Sealed(nn.Module):
        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, PagedExperts):
                raise TypeError("sealed")
            super().__setattr__(name, value)

    model = small()
    expected = model(tokens(1, 5)).logits
    block = model.model.layers[1].mlp
    block.__class__ = type("SealedBlock", (Sealed, type(block)), {})
    with pytest.raises(TypeError, match="sealed"):
        pagedweight.patch(model, keep_original=True)
    assert not hasattr(model, "pagedweight")
    assert not model._forward_pre_hooks
    assert not {"save_pretrained", "init_continuous_batching"} & vars(model).keys()
    assert torch.equal(model(tokens(1, 5)).logits, expected)


@torch.no_grad()
def test_a_model_without_room_for_dense_weights_stays_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pagedweight.patch(small())
    expected = model(tokens(1, 5)).logits
    with monkeypatch.context() as short:
        without_room_for(1, short, MemoryError())
        with pytest.raises(MemoryError):
            pagedweight.unpatch(model)
    assert not any(experts.has_weights for experts in model.pagedweight.replaced)
    assert torch.equal(model(tokens(1, 5)).logits, expected)
    assert not hasattr(pagedweight.unpatch(model), "pagedweight")
    assert isinstance(model(tokens(1, 5)).logits, torch.Tensor)


@torch.no_grad()
def test_a_closed_model_answers_and_says_why_it_is_neither_saved_nor_unpatched(tmp_path: Path) -> None:
    model = pagedweight.patch(small())
    pagedweight.save(model, tmp_path)
    expected = model(tokens(1, 5)).logits
    model.pagedweight.close()
    assert torch.equal(model(tokens(1, 5)).logits, expected)
    with pytest.raises(RuntimeError, match="is closed and its pages are gone, so it cannot be saved"):
        model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="is closed and its pages are gone, so it stays patched"):
        pagedweight.unpatch(model)
    assert torch.equal(pagedweight.load(tmp_path)(tokens(1, 5)).logits, expected), "as it was saved before"
    kept = pagedweight.patch(small(), keep_original=True)
    kept.pagedweight.close()
    assert not hasattr(pagedweight.unpatch(kept), "pagedweight")


def test_weights_that_are_half_dropped_are_given_back() -> None:
    """As by an interrupt between the two of them."""
    model = pagedweight.patch(small(), keep_original=True)
    experts = model.pagedweight.replaced[0]
    del experts.module.gate_up_proj
    assert not experts.has_weights
    assert model(tokens(1, 4)).logits.shape == pagedweight.unpatch(model)(tokens(1, 4)).logits.shape
