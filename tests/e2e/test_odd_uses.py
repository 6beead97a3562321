"""What else people do with a patched model: the answer is the dense model's, or one sentence, and nothing is left."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import DynamicCache, PreTrainedModel

import pagedweight
from tests.e2e.test_pressure import tight
from tests.hf_models import DenseReference, mixtral_m8, tokens


@pytest.fixture
def model() -> PreTrainedModel:
    return tight("M8")


@torch.no_grad()
def test_under_autocast_experts_round_as_they_always_do(model: PreTrainedModel) -> None:
    """Autocast casts what the model's own layers multiply, not the sums within the kernels' twin."""
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 64, generator=generator)
    ids, weights = torch.tensor([[0, 3]] * 5), torch.rand(5, 2, generator=generator)
    plain = experts(hidden, ids, weights)
    dense = DenseReference("M8").set_bits(model.pagedweight.snapshot().bits)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(experts(hidden, ids, weights), plain)
        got, want = (one(tokens(2, 7)).logits.float() for one in (model, dense))
    assert (got - want).abs().max() < 2e-2 * want.abs().max()


@torch.no_grad()
def test_parameters_given_from_outside_and_memory_that_is_shared_change_nothing(model: PreTrainedModel) -> None:
    wanted = model(tokens(2, 7)).logits
    given = torch.func.functional_call(model, dict(model.named_parameters()), (tokens(2, 7),)).logits
    assert torch.equal(given, wanted)
    assert torch.equal(model.share_memory()(tokens(2, 7)).logits, wanted)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1])
def test_a_request_that_is_cut_off_within_its_prompt_leaves_nothing(model: PreTrainedModel, layer: int) -> None:
    class Gone(Exception):
        pass

    def leave(*_: object) -> None:
        raise Gone

    paged = model.pagedweight
    with paged.held_at(2):
        wanted = model(tokens(1, 9), past_key_values=DynamicCache(config=model.config)).logits
        free = paged.arena.free_frames
        hook = model.model.layers[layer].mlp.register_forward_hook(leave)
        for released in (True, False):
            cache = paged.new_cache()
            with pytest.raises(Gone):
                model(tokens(2, 33), past_key_values=cache)
            paged.check()
            if released:
                cache.release()
        hook.remove()
        if layer == 0:
            with pytest.raises(ValueError, match="since a forward or a change of the batch ended half-way"):
                model(tokens(2, 1), past_key_values=cache)
        del cache
        gc.collect()
        after = paged.new_cache()
        assert torch.equal(model(tokens(1, 9), past_key_values=after).logits, wanted)
        after.release()
        paged.check()
        assert paged.snapshot().kv_bytes == 0
        assert paged.arena.free_frames == free


@torch.no_grad()
def test_a_batch_of_nothing_is_refused_before_it_takes_anything(model: PreTrainedModel) -> None:
    cache = model.pagedweight.new_cache()
    with pytest.raises(ValueError, match="no sequence"):
        model(tokens(2, 7)[:0], past_key_values=cache)
    with pytest.raises(RuntimeError, match="0 elements"):  # the model's own words
        model(tokens(2, 7)[:, :0], past_key_values=cache)
    assert model.pagedweight.snapshot().kv_bytes == 0
    assert model(tokens(1, 1), past_key_values=cache).logits.isfinite().all()


@contextmanager
def no_room_beyond(file_bytes: int) -> Iterator[None]:
    """A file that would grow larger fails to be written, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("way", ["quantize a folder", "quantize a model", "save"])
def test_a_full_disk_leaves_a_folder_that_does_not_load_until_the_same_call_ends_well(tmp_path: Path, way: str) -> None:
    dense, out = mixtral_m8(), tmp_path / "out"
    dense.save_pretrained(tmp_path / "dense")
    model = pagedweight.patch(mixtral_m8()) if way == "save" else None

    def write() -> None:
        if model is not None:
            pagedweight.save(model, out)
        else:
            pagedweight.quantize(dense if way == "quantize a model" else tmp_path / "dense", out)

    with no_room_beyond(2**19), pytest.raises(OSError, match="too large"):
        write()
    assert list(out.rglob("*"))
    for load in (pagedweight.load, pagedweight.from_pretrained):
        with pytest.raises(ValueError, match=r"has no metadata\.json"):
            load(out)
    write()
    assert pagedweight.load(out)(tokens(1, 3)).logits.isfinite().all()
    assert not list(out.rglob("*.tmp"))
