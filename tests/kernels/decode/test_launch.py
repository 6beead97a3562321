from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pagedweight.kernels.call import Call
from pagedweight.kernels.decode.config import MAX_TOKENS, DecodeConfig, ProductConfig
from pagedweight.kernels.fused_moe import launch_fused_moe
from pagedweight.layout import MoeLayer, RoutingStats
from tests.kernels.decode.support import DEVICE, MANY, ONE, hidden_of, random_batch, random_layer, reference, run
from tests.support import assert_close, one_tile

INT8_BOOKS = ("lut8", "lut8", "affine", "affine")
WIDE_BOOKS = ("lut16", "lut16", "cubic", "lut16")  # two bytes a weight, and 16-bit products beside them


@settings(max_examples=6, phases=[Phase.generate])  # shrinking would take minutes in the interpreter
@given(
    hidden=st.integers(8, 150),
    intermediate=st.integers(8, 150),
    experts=st.integers(1, 5),
    tokens=st.integers(1, 6),
    widths=st.sets(st.integers(2, 8), min_size=1, max_size=3),
    data=st.data(),
)
def test_equals_the_dense_layer_at_random_widths(hidden, intermediate, experts, tokens, widths, data):
    widths = tuple(sorted(widths))
    books = tuple(
        data.draw(st.sampled_from(["lut16", "affine", "cubic" if bits > 4 else "lut8"]), label=f"{bits}-bit codebook")
        for bits in widths
    )
    activation = data.draw(st.sampled_from(["silu", "gelu_tanh"]))
    layer = random_layer(MoeLayer(0, experts, hidden, intermediate, activation), widths, books, seed=hidden)
    batch = random_batch(layer, tokens, data.draw(st.integers(1, experts)), seed=tokens)
    assert_close(run(layer, batch, ONE if tokens == 1 else MANY), reference(layer, batch), torch.float16)


@pytest.mark.parametrize(
    ("tokens", "config", "seed"),
    [
        (1, DecodeConfig(ProductConfig(16, 2), ProductConfig(32, 2), 1), 6),  # column chunks in operand rows
        (1, DecodeConfig(ProductConfig(16, 1, 1, 2), ProductConfig(64, 1, 2), 1), 7),  # one step a program
        (1, replace(ONE, int8=True), 6),  # digits made by every program
        (1, replace(ONE, int8=True, prepared=True), 7),  # digits and slots by an earlier launch
        (3, replace(MANY, int8=True), 6),
        (10, replace(MANY, int8=True, tokens=8), 7),  # two products for one decoded tile, and a second slot
    ],
    ids=["chunks", "splits", "int8", "int8-prepared", "int8-many", "int8-eight"],
)
def test_every_cut_gives_the_same_answer(tokens, config, seed):
    # Seed 6 draws 5 and 4 bits, seed 7 draws 8 and 2.
    # A full column block and a tail of 6 words for x, one and 2 words for h.
    for books in (INT8_BOOKS, WIDE_BOOKS) if config.int8 and not config.prepared else (INT8_BOOKS,):
        layer = random_layer(MoeLayer(0, 1, 700, 548), (2, 4, 5, 8), books, seed=seed)
        batch = random_batch(layer, tokens, 1, seed=4)
        assert_close(run(layer, batch, config), reference(layer, batch), torch.float16)


def test_placement_and_all_that_nothing_owns_change_no_bit():
    shape = MoeLayer(0, 3, 96, 70)
    layers = [
        random_layer(shape, (2, 3, 6), seed=1, placement=place, poison=byte) for place, byte in ((0, 0), (1, 255))
    ]
    batch = random_batch(layers[0], 5, 2, seed=2)
    first, second = (run(layer, batch, MANY) for layer in layers)
    assert torch.equal(first, second)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_foreign_and_repeated_ids_case_51(id_type):
    layer = random_layer(MoeLayer(0, 3, 64, 48), (3,), seed=5)
    batch = random_batch(layer, 4, 2, seed=6)
    ids = torch.full((4, 4), 77, dtype=id_type, device=DEVICE)
    ids[:, ::2] = torch.tensor([[0, 0], [-1, 3], [2, 1], [1, 99]], device=DEVICE)
    weights = torch.full((4, 4), float("nan"), device=DEVICE)
    weights[:, 1::2] = batch.weights
    batch = batch._replace(ids=ids[:, ::2], weights=weights[:, 1::2])
    out = run(layer, batch, MANY)
    assert_close(out, reference(layer, batch), torch.float16)
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize(
    "config",
    [ONE, replace(ONE, early_routing=True), MANY, replace(MANY, early_routing=True), replace(MANY, separate_sum=True)],
    ids=["one", "one-early", "many", "many-early", "apart"],
)
def test_the_weight_of_an_id_that_is_no_expert_may_be_anything(config):
    layer = random_layer(MoeLayer(0, 3, 64, 48), (3,), seed=5)
    batch = random_batch(layer, config.tokens, 2, seed=6)
    batch.ids[:, 0] = -1
    clean = run(layer, batch, config)
    batch.weights[:, 0] = float("nan")
    assert clean.any()
    assert torch.equal(run(layer, batch, config), clean)


@pytest.mark.parametrize("config", [ONE, MANY], ids=["one", "many"])
@pytest.mark.parametrize("foreign", [2**32 + 1, 2**31 + 1, -(2**32) + 2])
def test_an_id_that_is_an_experts_only_in_32_bits_is_none(config, foreign):
    layer = random_layer(MoeLayer(0, 3, 64, 48), (3,), seed=5)
    batch = random_batch(layer, config.tokens, 2, seed=6)
    batch.ids[:, 0] = -1
    stats, expected_stats = (RoutingStats.zeros(1, 1, 3, device=DEVICE) for _ in range(2))
    expected = run(layer, batch, config, expected_stats)
    batch.ids[:, 0] = foreign
    assert torch.equal(run(layer, batch, config, stats), expected)
    assert all(map(torch.equal, stats, expected_stats))


def test_one_expert_takes_every_token():
    layer = random_layer(MoeLayer(0, 3, 64, 48), (4,), seed=7)
    batch = random_batch(layer, 9, 1, seed=8)
    batch.ids.fill_(2)
    assert_close(run(layer, batch, MANY), reference(layer, batch), torch.float16)


def test_a_token_alone_and_in_a_batch_is_the_same_bits_case_55():
    layer = random_layer(MoeLayer(0, 3, 64, 48), (3, 4), seed=9)
    batch = random_batch(layer, 6, 2, seed=10)
    config = replace(MANY, prepared=True)
    alone = [run(layer, batch._replace(**_token(batch, t)), config) for t in range(6)]
    assert torch.equal(torch.cat(alone), run(layer, batch, config))


def _token(batch, token):
    return {name: getattr(batch, name)[token : token + 1] for name in batch._fields}


@pytest.mark.parametrize("tokens", [1, 5])
def test_statistics_by_request_slot(tokens):
    layer = random_layer(MoeLayer(0, 3, 64, 48), (3,), seed=11)
    batch = random_batch(layer, tokens, 2, seed=12)
    batch = batch._replace(slots=torch.tensor([1, 0, -1, 1, 0][:tokens], dtype=torch.int32, device=DEVICE))
    batch.ids[0, 0] = 3
    # Room for one expert more than the layer has: the largest layer of the model decides that.
    stats = RoutingStats.zeros(2, 1, 4, device=DEVICE)
    run(layer, batch, ONE if tokens == 1 else MANY, stats)
    expected = RoutingStats.zeros(2, 1, 4, device=DEVICE)
    for token, slot in enumerate(batch.slots.tolist()):
        for expert, weight in zip(batch.ids[token].tolist(), batch.weights[token].tolist(), strict=True):
            if slot >= 0 and expert < 3:
                expected.mass[slot, 0, expert] += weight
                expected.counts[slot, 0, expert] += 1
                inputs = (batch.x[token].double(), hidden_of(layer, batch.x[token], expert))
                for projection, norm in enumerate(float(vector.norm()) for vector in inputs):
                    feature = expected.features[slot, 0, expert, projection]
                    feature += torch.tensor([weight * norm, weight * norm**2, 0.0], device=DEVICE)
                    feature[2] = max(float(feature[2]), norm)
    assert torch.equal(stats.counts, expected.counts)
    assert_close(stats.mass, expected.mass)
    assert_close(stats.features, expected.features)


def test_bf16_is_upcast_case_49():
    layer = random_layer(MoeLayer(0, 2, 64, 48), (3, 5), ("lut8", "cubic"), seed=13)
    batch = random_batch(layer, 3, 2, seed=14, dtype=torch.bfloat16)
    assert_close(run(layer, batch, MANY), reference(layer, batch), torch.bfloat16)


def test_settings_that_cannot_run_are_refused():
    layer = random_layer(MoeLayer(0, 2, 64, 48), (3,), seed=15)
    batch = random_batch(layer, 2, 1)
    with pytest.raises(ValueError, match="3 splits of 1 steps"):
        run(layer, batch, replace(MANY, down=ProductConfig(rows=64, splits=3)))
    with pytest.raises(ValueError, match="int8 products need"):
        run(random_layer(layer.layer.shape, (5,)), batch, replace(MANY, int8=True))
    with pytest.raises(ValueError, match="lut8"):
        run(layer._replace(layer=layer.layer._replace(widths=(5,), codebooks={5: "lut8"})), batch, MANY)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("activation", "gated", "limit", "biases"),
    [
        ("relu2", False, 0.0, ()),
        ("relu2", True, 0.0, ("down_bias",)),
        ("gelu_tanh", False, 0.0, ("gate_up_bias",)),
        ("clamped_silu", True, 1.5, ()),
        ("capped_silu", True, 0.5, ()),
        ("gpt_oss", True, 1.0, ("gate_up_bias", "down_bias")),
    ],
)
def test_every_gate_and_bias_case_56(tokens, activation, gated, limit, biases):
    shape = MoeLayer(0, 2, 72, 40, activation, gated, limit)
    layer = random_layer(shape, (4,), ("lut8",), seed=16, biases=biases)
    batch = random_batch(layer, tokens, 2, seed=17)
    config = replace(ONE if tokens == 1 else MANY, int8=bool(biases))
    assert_close(run(layer, batch, config), reference(layer, batch), torch.float16)


def test_a_bias_is_added_once_however_the_columns_are_split():
    layer = random_layer(MoeLayer(0, 1, 64, 600), (3,), seed=18, biases=("down_bias",))
    batch = random_batch(layer, 2, 1, seed=19)
    config = replace(MANY, down=ProductConfig(rows=64, splits=2))
    assert_close(run(layer, batch, config), reference(layer, batch), torch.float16)


@pytest.mark.parametrize("config", [MANY, replace(MANY, int8=True), replace(ONE, int8=True)], ids=["16", "8", "one"])
def test_a_bad_token_is_seen_and_spoils_nothing_else(config):
    layer = random_layer(MoeLayer(0, 2, 64, 48), (4,), ("lut8",), seed=20)
    tokens = 1 if config.tokens == 1 else 4
    batch = random_batch(layer, tokens, 2, seed=21)
    clean = run(layer, batch, config)
    batch.x[0, 5] = float("nan")
    if tokens > 1:
        batch.x[1, 7], batch.weights[2, 0] = float("inf"), float("nan")
    stats = RoutingStats.zeros(1, 1, 2, device=DEVICE)
    out = run(layer, batch, config, stats)
    assert out[:3].isnan().any(1).all()
    assert torch.equal(out[3:], clean[3:])
    assert all(bool(tensor.isfinite().all()) for tensor in stats)
    assert int(stats.counts.sum()) == 2 * tokens - (tokens > 1)


def test_a_launch_of_its_own_adds_the_parts_to_the_same_bits():
    layer = random_layer(MoeLayer(0, 3, 64, 600), (3,), seed=22)
    batch = random_batch(layer, 4, 2, seed=23)
    batch.ids[1] = torch.tensor([7, -1])
    config = replace(MANY, down=ProductConfig(rows=64, splits=2))
    apart = run(layer, batch, replace(config, separate_sum=True))
    assert torch.equal(apart, run(layer, batch, config))
    assert not apart[1].any()


@pytest.mark.parametrize("config", [ONE, MANY, replace(MANY, int8=True)], ids=["one", "many", "int8"])
def test_case_43_nothing_relies_on_what_fresh_memory_holds(config, monkeypatch):
    layer = random_layer(MoeLayer(0, 4, 64, 48), (3, 4), ("lut8", "lut8"), seed=21)
    batch = random_batch(layer, min(config.tokens, 3), 2, seed=22)
    batch.ids[:] = 2
    batch.ids[0, 0] = -1
    expected = run(layer, batch, config)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, make=make, **k: _poisoned(make(*a, **k)))
    assert torch.equal(run(layer, batch, config), expected)


def _poisoned(fresh: torch.Tensor) -> torch.Tensor:
    return fresh.fill_(torch.nan if fresh.is_floating_point() else torch.iinfo(fresh.dtype).max)


@pytest.mark.parametrize("config", [ONE, replace(MANY, int8=True)], ids=["one", "int8"])
def test_case_7_neighbours_of_a_view_are_not_read(config):
    layer = random_layer(MoeLayer(0, 3, 44, 40), (3, 4), ("lut8", "lut8"), seed=23)
    batch = random_batch(layer, config.tokens, 2, seed=24)
    guarded = torch.full((config.tokens, 64), torch.nan, dtype=batch.x.dtype, device=DEVICE)
    guarded[:, :44] = batch.x
    assert torch.equal(run(layer, batch._replace(x=guarded[:, :44]), config), run(layer, batch, config))
    assert guarded[:, 44:].isnan().all()


def test_case_10_expert_ids_above_255():
    layer = random_layer(MoeLayer(0, 300, 32, 16), (2,), seed=25)
    batch = random_batch(layer, 1, 3, seed=26)
    batch.ids[:] = torch.tensor([[299, 256, 3]])
    assert_close(run(layer, batch, ONE), reference(layer, batch), torch.float16)


def test_case_53_both_sides_of_the_largest_batch_agree():
    layer = random_layer(MoeLayer(0, 2, 32, 16), (3, 4), ("lut8", "lut8"), seed=27)
    batch = random_batch(layer, MAX_TOKENS + 1, 1, seed=28)
    few = batch._replace(**{name: value[:-1] for name, value in batch._asdict().items()})
    stats = RoutingStats.zeros(1, 1, 2, device=DEVICE)
    call = Call(*batch, **layer.layer.arguments(layer.tables, stats))
    assert_close(run(layer, few, MANY), launch_fused_moe(call, one_tile(layer.layer))[:-1], torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_captured_call_behind_a_copy_and_a_fill_waits_for_both(tokens):
    layer = random_layer(MoeLayer(0, 6, 512, 352), (3,), ("lut8",), seed=24)
    batch = random_batch(layer, tokens, 2, seed=25)
    given, expected = batch.x.clone(), run(layer, batch)
    graph, scratch = torch.cuda.CUDAGraph(), torch.empty(1 << 20, device=DEVICE)
    with torch.cuda.graph(graph):
        batch.x.copy_(given)
        scratch.zero_()
        out = run(layer, batch)
        batch.x.fill_(0)  # too early, if the next call's first launch did not wait
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_tables_in_shared_memory_give_the_bits_of_tables_in_global_memory(dtype):
    layer = random_layer(MoeLayer(0, 4, 1132, 364), (5, 6), seed=26)  # rows and columns that fill no tile
    batch = random_batch(layer, 5, 2, seed=27, dtype=dtype)
    config = DecodeConfig(ProductConfig(16, warps=2), ProductConfig(32, warps=2), tokens=4, spread=True)
    shared, loaded = (run(layer, batch, replace(config, spread=spread)) for spread in (True, False))
    assert_close(shared, reference(layer, batch), dtype)
    assert torch.equal(shared, loaded)
