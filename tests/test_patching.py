"""What patch() finds, refuses and leaves alone, and what unpatch() puts back."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import re
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import JetMoeConfig, JetMoeForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.discovery import find_experts
from pagedweight.discovery_devices import refuse_old_device
from pagedweight.experts import PagedExperts
from pagedweight.layout import BlockId, Projection
from tests.hf_models import COMMON, FAMILIES, gemma4_g16, mixtral_m8, quantized_folder, qwen2_moe_q60, tokens


def small(**changes) -> PreTrainedModel:
    """Two experts, quick to quantize."""
    return mixtral_m8(num_local_experts=2, num_experts_per_tok=1, intermediate_size=32, **changes)


def fingerprint(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor], modules: list[str]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [type(module).__name__ for module in model.modules()] == modules
    assert not hasattr(model, "pagedweight")
    assert not model._forward_pre_hooks


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON, hidden_size=64, intermediate_size=96, num_key_value_heads=2))


def jetmoe() -> PreTrainedModel:
    settings = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "kv_channels": 8, "num_key_value_heads": 2}
    return JetMoeForCausalLM(JetMoeConfig(**settings, num_local_experts=2, num_experts_per_tok=1))


def changed(change: Callable[[nn.Module], None]) -> Callable[[], PreTrainedModel]:
    """A model whose second layer's experts have been changed."""

    def make() -> PreTrainedModel:
        model = small()
        change(model.model.layers[1].mlp.experts)
        return model

    return make


def set_parameter(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def change(experts: nn.Module) -> None:
        setattr(experts, name, nn.Parameter(make(getattr(experts, name).detach()), requires_grad=False))

    return change


def normalise(experts: nn.Module) -> None:
    experts.has_post_expert_norm = True


def lose_gate(experts: nn.Module) -> None:
    experts.has_gate = False


def add_bias(experts: nn.Module) -> None:
    experts.down_proj_bias = nn.Parameter(torch.zeros(2, 64))


def use_relu(experts: nn.Module) -> None:
    experts.act_fn = nn.ReLU()


REFUSALS = {
    "no experts": (llama, "LlamaForCausalLM has no routed experts that are served .*transformers 5.9 or later"),
    "another design": (jetmoe, "no routed experts .* is a JetMoeParallelExperts, whose weights"),
    "transposed": (changed(lambda e: setattr(e, "is_transposed", True)), r"gate_up weights \(2, 64, 64\) beside"),
    "normalised": (changed(normalise), r"layers\.1\.mlp\.experts normalises each expert's output"),
    "unknown activation": (changed(use_relu), r"layers\.1\.mlp\.experts combines gate and up .*act_fn is ReLU"),
    "biases": (changed(add_bias), r"layers\.1\.mlp\.experts has parameters .*down_proj_bias"),
    "interleaved": (changed(lambda e: setattr(e, "is_concatenated", False)), "combines gate and up"),
    "no gate": (changed(lose_gate), r"has parameters \['down_proj', 'gate_up_proj'\]; only \['down_proj', 'up_proj'\]"),
    "expert parallel": (changed(lambda e: setattr(e, "_is_expert_parallel", True)), "expert-parallel"),
    "shapes": (changed(set_parameter("gate_up_proj", lambda w: w[:, 1:])), r"gate_up weights \(2, 63, 64\) beside"),
    "float8": (changed(set_parameter("down_proj", lambda w: w.to(torch.float8_e4m3fn))), "float8_e4m3fn; load"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_model_that_cannot_be_served_is_refused_and_left_alone(kind: str) -> None:
    make, message = REFUSALS[kind]
    model = make()
    before, modules = fingerprint(model), [type(module).__name__ for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        pagedweight.patch(model)
    assert_untouched(model, before, modules)


def test_case_103_the_first_meta_parameter_is_named() -> None:
    with torch.device("meta"):
        model = type(small())(small().config)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj is on the meta device"):
        pagedweight.patch(model)


@pytest.mark.parametrize("config", [{"quant_method": "mxfp4"}, pagedweight.PagedWeightConfig()])
def test_a_model_of_another_quantizer_is_refused(config: object) -> None:
    model = small()
    model.config.quantization_config = config
    before, modules = fingerprint(model), [type(module).__name__ for module in model.modules()]
    with pytest.raises(ValueError, match=r"is quantized by (mxfp4|pagedweight); load it in bfloat16"):
        pagedweight.patch(model)
    assert_untouched(model, before, modules)


@pytest.mark.parametrize(
    ("capability", "dtype", "says"),
    [
        ((7, 0), torch.float16, "compute capability 7.0; the kernels need 7.5"),
        ((7, 5), torch.bfloat16, "no bfloat16; load the model in float16"),
        ((7, 5), torch.float16, None),
        ((8, 0), torch.bfloat16, None),
    ],
)
def test_case_123_devices_too_old_are_refused_in_a_sentence(monkeypatch, capability, dtype, says) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = [experts._replace(dtype=dtype) for experts in find_experts(small())]
    if says is None:
        refuse_old_device(torch.device("cuda"), found)
    else:
        with pytest.raises(ValueError, match=says):
            refuse_old_device(torch.device("cuda"), found)


@torch.no_grad()
def test_case_124_a_gpu_that_is_not_nvidias_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    refuse_old_device(torch.device("cpu"), find_experts(small()))
    with pytest.raises(ValueError, match=r"^cuda is AMD's, and pages move through CUDA's driver; patch the model on"):
        refuse_old_device(torch.device("cuda"), find_experts(small()))


@pytest.mark.parametrize("keep", [False, True])
def test_unpatch_gives_weights_in_the_dtype_the_model_has_by_then(keep: bool) -> None:
    model = pagedweight.patch(small(), keep_original=keep).half()
    patched = model(tokens(1, 5)).logits
    pagedweight.unpatch(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    # The originals differ from the pages by the quantizer's error.
    assert (model(tokens(1, 5)).logits - patched).abs().max() < (0.3 if keep else 0.02) * patched.abs().max()


def test_offloaded_experts_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    model = small()
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="experts is offloaded to CPU or disk"):
        pagedweight.patch(model)


@pytest.mark.parametrize("keep", [False, True])
def test_a_layer_that_fails_half_way_leaves_a_whole_model(keep: bool) -> None:
    """Without keep_original the layers before it have lost their weights; they get their parent-width ones back."""
    model = small()
    kept = fingerprint(model)
    faulty = model.model.layers[1].mlp.experts.down_proj.data
    faulty[1, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"layers\.1\.experts\.1\.down holds NaN or infinite"):
        pagedweight.patch(model, keep_original=keep)
    faulty[1, 0, 0] = kept["model.layers.1.mlp.experts.down_proj"][1, 0, 0]
    for name, weight in model.state_dict().items():
        if keep or "layers.0.mlp.experts" not in name:
            assert torch.equal(weight, kept[name])
        else:
            assert 0 < (weight - kept[name]).abs().max() < 0.2
    pagedweight.patch(model)


def test_a_budget_that_is_too_small_names_the_least_that_works() -> None:
    model = small()
    before, modules = fingerprint(model), [type(module).__name__ for module in model.modules()]
    with pytest.raises(ValueError, match=r"budget_bytes is 1000; expert weights at 2 bits take (\d+) and .*") as error:
        pagedweight.patch(model, config=RuntimeConfig(budget_bytes=1000))
    assert_untouched(model, before, modules)
    least = int(str(error.value).rsplit(" ", 1)[1])
    with pytest.raises(ValueError, match=f"give at least {least}"):
        pagedweight.patch(model, config=RuntimeConfig(budget_bytes=least - 1))
    assert_untouched(model, before, modules)
    pagedweight.patch(model, config=RuntimeConfig(budget_bytes=least))
    assert set(model.pagedweight.snapshot().bits) == {2}
    ids = model.generate(tokens(1, 4), past_key_values=model.pagedweight.new_cache(), max_new_tokens=4, do_sample=False)
    assert ids.shape == (1, 8)


@pytest.mark.parametrize("block_tokens", [1, 16])
def test_the_least_budget_serves_one_sequence_of_a_blocks_tokens(block_tokens: int) -> None:
    """Also where a frame holds far more tokens than a block: K and V of every layer still take a frame each."""
    settings = {"frame_bytes": 8192, "block_tokens": block_tokens}
    with pytest.raises(ValueError, match="so give at least") as error:
        pagedweight.patch(small(), config=RuntimeConfig(budget_bytes=1, **settings))
    least = int(str(error.value).rsplit(" ", 1)[1])
    model = pagedweight.patch(small(), config=RuntimeConfig(budget_bytes=least, **settings))
    cache = model.pagedweight.new_cache()
    with torch.no_grad():
        model(tokens(1, block_tokens), past_key_values=cache)
    assert cache.held_bytes == model.pagedweight.snapshot().kv_bytes == 4 * 8192


def test_a_forward_wrapped_around_the_experts_survives_patching() -> None:
    """As accelerate wraps one; sizing the budget passes experts by for a moment."""
    model = small()
    experts = model.model.layers[0].mlp.experts
    experts.forward = wrapped = lambda *args, forward=experts.forward: forward(*args)
    pagedweight.patch(model, config=RuntimeConfig(budget_bytes=2**20), keep_original=True)
    pagedweight.unpatch(model)
    assert model.model.layers[0].mlp.experts.forward is wrapped


def test_a_preparation_of_ones_own_survives_patching() -> None:
    model = mixtral_m8()
    own = model.prepare_inputs_for_generation = lambda *args, **kwargs: type(model).prepare_inputs_for_generation(
        model, *args, **kwargs
    )
    pagedweight.patch(model)
    model.generate(tokens(1, 4), max_new_tokens=2, do_sample=False)
    pagedweight.unpatch(model)
    assert model.prepare_inputs_for_generation is own


def test_patching_twice_is_refused() -> None:
    model = pagedweight.patch(small())
    with pytest.raises(ValueError, match="patched already; unpatch it first"):
        pagedweight.patch(model)
    with pytest.raises(ValueError, match="patched already; unpatch"):
        pagedweight.patch(model.model)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    model = small()
    before, modules = fingerprint(model), [type(module).__name__ for module in model.modules()]
    with pytest.raises(ValueError, match=r"the checkpoint is for other experts: .*intermediate=32"):
        pagedweight.patch(model, checkpoint=quantized_folder("M8"))
    assert_untouched(model, before, modules)


def test_case_58_gemma_4_experts_are_found_on_the_decoder_layer() -> None:
    model = pagedweight.patch(gemma4_g16(), checkpoint=quantized_folder("G16"))
    assert model.pagedweight.layout.rows == 2 * 16 * 2
    assert model.pagedweight.layout.moe_layers[0].activation == "gelu_tanh"
    wrapper = nn.ModuleDict({"language_model": gemma4_g16().model})
    assert [experts.path for experts in find_experts(wrapper)] == [f"language_model.layers.{n}.experts" for n in (0, 1)]


def test_layers_without_experts_keep_their_numbers() -> None:
    model = qwen2_moe_q60(num_experts=2, num_experts_per_tok=1, mlp_only_layers=[0])
    pagedweight.patch(model)
    assert [layer.layer for layer in model.pagedweight.layout.moe_layers] == [1]
    assert model.pagedweight.explain(BlockId(1, 1, Projection.DOWN)).startswith("layers.1.experts.1.down: 6 bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_case_4_and_36_all_but_the_experts_stays_bit_for_bit(family: str) -> None:
    model = FAMILIES[family]()
    before = {name: tensor for name, tensor in fingerprint(model).items() if ".experts." not in name}
    pagedweight.patch(model, checkpoint=quantized_folder(family))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_case_32_dense_weights_die_as_they_are_quantized() -> None:
    model = small()
    dead = [weakref.ref(p) for name, p in model.named_parameters() if ".experts." in name]
    gc.disable()
    try:
        pagedweight.patch(model)
        assert [ref() for ref in dead] == [None] * len(dead)
    finally:
        gc.enable()


def test_case_115_the_bytes_reported_are_the_bytes_held() -> None:
    model = mixtral_m8()
    dense_bytes = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    pagedweight.patch(model, checkpoint=quantized_folder("M8"))
    snapshot = model.pagedweight.snapshot()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in model.modules()
        if isinstance(module, PagedExperts)
        for tensor in (module.tables.memory,)
    }
    assert len(storages) == 1
    held = sum(storages.values())
    assert snapshot.weight_bytes <= held <= 1.01 * snapshot.weight_bytes
    assert held < dense_bytes


def test_case_115_weights_that_paging_makes_no_smaller_are_warned_of() -> None:
    """Rows of 22 and 44 half-precision numbers are shorter than a table of 64."""
    with pytest.warns(UserWarning, match=r"take (\d+) bytes at the largest width, no less than the (\d+)") as caught:
        pagedweight.patch(gemma4_g16().half())
    paged, dense = (int(word) for word in str(caught[0].message).split() if word.isdigit())
    assert paged > dense == 2 * 16 * (2 * 22 * 88 + 88 * 22) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pagedweight.patch(mixtral_m8())


def test_unpatch_restores_exactly_what_was_kept() -> None:
    model = small()
    before, modules = fingerprint(model), [type(module).__name__ for module in model.modules()]
    trainable = [p.requires_grad for p in model.parameters()]
    pagedweight.patch(model, keep_original=True)
    assert model.state_dict().keys() != before.keys()
    assert pagedweight.unpatch(model) is model
    assert_untouched(model, before, modules)
    assert [p.requires_grad for p in model.parameters()] == trainable
    assert model.save_pretrained.__self__ is model


def test_unpatch_without_the_originals_gives_the_parent_width() -> None:
    model = small(dtype=torch.bfloat16).to(torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    pagedweight.patch(model)
    model.pagedweight.set_bits(2)
    expected = model.pagedweight.store.dense(model.pagedweight.layout.moe_layers[1], Projection.DOWN, 6)
    pagedweight.unpatch(model)
    restored = model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(restored, expected.to(torch.bfloat16))
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    with pytest.raises(ValueError, match="is not patched"):
        pagedweight.unpatch(model)


def test_case_83_inference_mode_on_either_side() -> None:
    ids = tokens(2, 9)
    inside = small()
    outside = copy.deepcopy(inside)
    with torch.inference_mode():
        pagedweight.patch(inside)
    pagedweight.patch(outside)
    for model in (inside, outside):
        model.pagedweight.set_bits(3)
        model.to(torch.float32)
    with torch.no_grad():
        plain = [model(ids).logits for model in (inside, outside)]
    with torch.inference_mode():
        inference = [model(ids).logits for model in (inside, outside)]
        outside.pagedweight.set_bits(6)
    assert all(torch.equal(plain[0], other) for other in (*plain, *inference))
    assert set(outside.pagedweight.snapshot().bits) == {6}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
def test_a_patched_model_says_why_it_cannot_be_copied(duplicate: Callable[[nn.Module], object]) -> None:
    model = pagedweight.patch(small())
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: .*pagedweight\.save"):
        duplicate(model)
    duplicate(pagedweight.unpatch(model))


def test_case_111_dtype_and_device_moves_leave_planes_alone() -> None:
    model = pagedweight.patch(small())
    memory = model.pagedweight.arena.memory
    before = memory.clone()
    ids = tokens(2, 9)
    with torch.no_grad():
        for move, dtype in (
            (lambda m: m.half(), torch.float16),
            (lambda m: m.to(torch.bfloat16), torch.bfloat16),
            (lambda m: m.float(), torch.float32),
            (lambda m: m.to("cpu"), torch.float32),
        ):
            assert move(model)(ids).logits.dtype == dtype
            assert model.pagedweight.arena.memory is memory
            assert torch.equal(memory, before)


def test_case_113_adapters_reach_attention_or_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    on_experts = peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], r=2)
    wrapped = peft.get_peft_model(small(), on_experts)
    with pytest.raises(ValueError, match="adapter of type ParamWrapper is wrapped around the expert weights"):
        pagedweight.patch(wrapped)
    with pytest.raises(ValueError, match="target"):
        peft.get_peft_model(pagedweight.patch(small()), on_experts)
    ids = tokens(2, 9)
    model = pagedweight.patch(small())
    with torch.no_grad():
        before = model(ids).logits
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        assert (adapted(ids).logits - before).abs().max() > 1e-3 * before.abs().max()


def test_backward_through_paged_experts_says_that_it_cannot() -> None:
    model = pagedweight.patch(small())
    with pytest.raises((NotImplementedError, RuntimeError), match="pagedweight"):
        model(tokens(1, 5), labels=tokens(1, 5)).loss.backward()


def test_padding_is_not_counted() -> None:
    model = pagedweight.patch(small())
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask)
    assert model.pagedweight.stats.counts.sum(-1).tolist() == [[13, 13]]


def test_statistics_are_those_of_the_current_sequences() -> None:
    """Eq. 1 and the features of Eq. 5 speak of what is being served; what was served before has no say."""
    model = pagedweight.patch(small())
    counts = model.pagedweight.stats.counts
    for length in (9, 6):
        model.generate(tokens(2, length), max_new_tokens=4, do_sample=False)
        assert counts.sum(-1).tolist() == [[2 * (length + 3)] * 2]


def test_mass_and_features_arrive_in_the_slot_of_their_batch_row() -> None:
    """Three sequences, one of them padded, in two slots: each slot holds what its rows alone leave behind."""
    model = pagedweight.patch(small(), config=RuntimeConfig(max_requests=2))
    alone = pagedweight.patch(small())
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask)
        for slot, rows in enumerate(([0, 2], [1])):
            for counted in alone.pagedweight.stats:
                counted.zero_()
            alone(ids[rows], attention_mask=mask[rows])
            for got, expected in zip(model.pagedweight.stats, alone.pagedweight.stats, strict=True):
                torch.testing.assert_close(got[slot], expected[0])
        assert model.pagedweight.stats.counts.sum(-1).tolist() == [[18, 18], [4, 4]]
        model(ids)
        assert model.pagedweight.stats.counts.sum(-1).tolist() == [[18, 18], [9, 9]]


def test_a_request_slot_starts_anew_with_its_sequence_and_not_before() -> None:
    model = pagedweight.patch(small(), config=RuntimeConfig(max_requests=2, budget_bytes=2**20))
    counts = model.pagedweight.stats.counts
    for batch, expected in ((2, [12, 12]), (1, [12, 12])):  # the second batch leaves slot 1 as it is
        cache = model.pagedweight.new_cache()
        model.generate(tokens(batch, 8), past_key_values=cache, max_new_tokens=5, do_sample=False)
        assert counts[:, 0].sum(-1).tolist() == expected


def test_request_slots_weigh_what_their_sequences_hold_in_the_cache() -> None:
    """With the cache's frames known, a slot without a sequence has no say, whatever is left in its statistics."""
    model = pagedweight.patch(small(), config=RuntimeConfig(max_requests=3, budget_bytes=2**20, plan_period_steps=1))
    cache = model.pagedweight.new_cache()
    with torch.no_grad():
        model(tokens(2, 8), past_key_values=cache)
        model.pagedweight.stats.mass[2, :, 0] = 1e6
        held = cache.frames_by_sequence(2)
        model(tokens(2, 1), past_key_values=cache)
    mass = model.pagedweight.stats.mass[:2].clone()
    signals = model.pagedweight._runtime._signals
    assert signals.request_kv.tolist() == [*held, 0]
    assert min(held) > 0
    merged = signals.refresh(wait=True).merged.mass
    torch.testing.assert_close(merged, (mass / mass.sum(-1, keepdim=True)).mean(0))


def test_the_forecast_makes_room_for_the_sequences_that_are_there() -> None:
    """Off by default; on, weights are lower for the same cache, and come back up when it is gone."""
    means = []
    for forecast_tokens in (0, 64):
        settings = {"offload_free_blocks": 2, "reload_free_blocks": 4, "min_dwell_steps": 1, "block_tokens": 4}
        config = RuntimeConfig(budget_bytes=2**20, forecast_tokens=forecast_tokens, **settings)
        roomy = pagedweight.patch(small(), config=config).pagedweight
        budget_bytes = roomy.snapshot().weight_bytes + 12 * roomy.kv.block_bytes
        model = pagedweight.patch(small(), config=dataclasses.replace(config, budget_bytes=budget_bytes))
        cache = model.pagedweight.new_cache()
        with torch.no_grad():
            for _ in range(3):
                model(tokens(2, 1), past_key_values=cache)
        means.append(model.pagedweight.snapshot().mean_bits)
        cache.release()
        for _ in range(30):
            model.pagedweight.boundary()
        assert model.pagedweight.snapshot().mean_bits == 6
    assert means[1] < means[0] == 6


def test_a_cache_without_a_budget_or_of_another_model_is_refused() -> None:
    model = pagedweight.patch(small())
    with pytest.raises(ValueError, match=r"RuntimeConfig\(budget_bytes=...\)"):
        model.pagedweight.new_cache()
    first, second = (pagedweight.patch(small(), config=RuntimeConfig(budget_bytes=2**20)) for _ in range(2))
    with pytest.raises(ValueError, match="another model's arena"), torch.no_grad():
        first(tokens(1, 4), past_key_values=second.pagedweight.new_cache())


def test_case_89_a_block_of_other_bytes_than_the_caches_is_an_error() -> None:
    model = pagedweight.patch(small(), config=RuntimeConfig(budget_bytes=2**20)).half()
    with pytest.raises(ValueError, match=r"float16\) and the budget was laid out for .*float32"), torch.no_grad():
        model(tokens(1, 4), past_key_values=model.pagedweight.new_cache())


def test_case_89_without_a_shared_cache_widths_stay_as_they_are() -> None:
    for config in (RuntimeConfig(), RuntimeConfig(budget_bytes=2**20)):
        model = pagedweight.patch(small(), config=config)
        model.generate(tokens(2, 5), max_new_tokens=20, do_sample=False)
        assert set(model.pagedweight.snapshot().bits) == {6}


@torch.no_grad()
def test_shared_experts_are_paged_too_when_asked_for_and_come_back() -> None:
    make, ids = lambda: qwen2_moe_q60(num_experts=4, shared_expert_intermediate_size=88), tokens(1, 9)
    dense, model = make(), make()
    pagedweight.patch(model, shared_experts=True, keep_original=True)
    assert model.pagedweight.layout.moe_layers[0].experts == 4 + 2
    assert (model(ids).logits - dense(ids).logits).abs().max() < 0.1 * dense(ids).logits.abs().max()
    model.pagedweight.set_bits(2)
    assert not torch.equal(model(ids).logits, dense(ids).logits)
    pagedweight.unpatch(model)
    assert torch.equal(model(ids).logits, dense(ids).logits)
    # What cannot be done leaves the model as it was.
    with pytest.raises(ValueError, match="budget_bytes is 1"):
        pagedweight.patch(model, shared_experts=True, config=RuntimeConfig(budget_bytes=1))
    assert torch.equal(model(ids).logits, dense(ids).logits)
    with pytest.raises(ValueError, match="no shared expert beside it"):
        pagedweight.patch(small(), shared_experts=True)


def test_inputs_that_were_prepared_for_no_forward_do_not_cost_another_its_boundary() -> None:
    model = pagedweight.patch(small())
    first, other = tokens(1, 4), tokens(1, 5)
    with torch.no_grad():
        before = model.pagedweight.snapshot().step
        model.prepare_inputs_for_generation(first, is_first_iteration=True)
        assert model.pagedweight.snapshot().step == before + 1
        model(other)
        assert model.pagedweight.snapshot().step == before + 2
        model(**model.prepare_inputs_for_generation(first, is_first_iteration=True))
        assert model.pagedweight.snapshot().step == before + 3


def test_a_forward_under_capture_asks_no_length_and_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A static cache's length lies on the device; the host that waits for it ends the capture."""

    class Static:
        def get_seq_length(self) -> int:
            raise AssertionError("asked for a length while a graph is captured")

    model = pagedweight.patch(small())
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        before = model.pagedweight.snapshot().step
        model.pagedweight.before_forward(input_ids=tokens(1, 4), past_key_values=Static())
        assert model.pagedweight.snapshot().step == before


def test_unpatching_leaves_a_save_of_ones_own_before_and_after() -> None:
    def mine(folder: str) -> str:
        return folder

    for when in ("before", "after"):
        model = small()
        if when == "before":
            model.save_pretrained = mine
        pagedweight.patch(model)
        assert model.save_pretrained is not mine
        if when == "after":
            model.save_pretrained = mine
        pagedweight.unpatch(model)
        assert model.save_pretrained is mine


def test_explain_says_what_the_runtime_is_doing_in_words() -> None:
    model = pagedweight.patch(small(), config=RuntimeConfig(budget_bytes=2**20))
    says = r"at rest: \d+ KV blocks of \d+ bytes free, offload at 8 .*; moved so far 0 rows down for 0 bytes, \d+ up"
    assert re.match(says, model.pagedweight.explain())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "paged/pagedweight"}, r"^policy is 'paged/pagedweight', a str; give a Policy, as Policy\.load"),
        ({"config": {"budget_bytes": 1}}, r"^config is \{'budget_bytes': 1\}, a dict; give a RuntimeConfig, as"),
        (
            {"budget_bytes": 2**30},
            r"^budget_bytes belongs in the config; give config=RuntimeConfig\(budget_bytes=\.\.\.\)",
        ),
    ],
)
def test_options_of_another_kind_are_told_before_anything_is_loaded(given: dict[str, object], says: str) -> None:
    for load in (pagedweight.load, pagedweight.from_pretrained):
        with pytest.raises(TypeError, match=says):
            load("nowhere", **given)
    if "budget_bytes" not in given:
        with pytest.raises(TypeError, match=says):
            pagedweight.patch(small(), **given)
    with pytest.raises(TypeError, match=r"^runtime is 3, a int; give a RuntimeConfig, as RuntimeConfig\("):
        pagedweight.PagedWeightConfig(runtime=3)


def test_a_name_in_a_models_place_is_refused_with_what_loads_it() -> None:
    with pytest.raises(TypeError, match=r"^model is 'some/model', a str; give a loaded model, or use from_pretrained"):
        pagedweight.patch("some/model")
