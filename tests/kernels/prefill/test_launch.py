import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.kernels.call import Call
from pagedweight.kernels.prefill.config import PrefillConfig
from pagedweight.kernels.reference import fused_moe_reference
from pagedweight.layout import MoeLayer, RoutingStats
from tests.kernels.decode.support import DEVICE, random_batch, random_layer, reference
from tests.support import assert_close

pytestmark = pytest.mark.gpu  # tensor cores of Hopper; the interpreter has none


NARROW = PrefillConfig(tokens=64)  # half the code to compile


def run(placed, batch, config=NARROW, stats=None):
    from pagedweight.kernels.prefill.launch import launch_prefill_moe

    stats = stats or RoutingStats.zeros(1, 1, placed.shape.experts, device=DEVICE)
    return launch_prefill_moe(Call(*batch, **placed.layer.arguments(placed.tables, stats)), config)


@settings(max_examples=5)  # each compiles two kernels
@given(
    hidden=st.integers(8, 1200),
    intermediate=st.integers(8, 700),
    experts=st.integers(1, 5),
    tokens=st.integers(1, 300),
    width=st.integers(2, 8),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_equals_the_dense_layer(hidden, intermediate, experts, tokens, width, dtype, data):
    book = data.draw(st.sampled_from(["lut16", "affine", "cubic" if width > 4 else "lut8"]))
    layer = random_layer(MoeLayer(0, experts, hidden, intermediate, "silu"), (width,), (book,), seed=hidden)
    batch = random_batch(layer, tokens, data.draw(st.integers(1, experts)), seed=tokens, dtype=dtype)
    config = data.draw(st.sampled_from([NARROW, PrefillConfig()]))
    assert_close(run(layer, batch, config), reference(layer, batch), dtype)


@pytest.fixture(scope="module")
def mixed():
    """Every linear-block at a width of its own; a tail of 8 words in x and one of 6 in h."""
    return random_layer(MoeLayer(0, 6, 768, 704, "silu"), (2, 4, 6), ("lut8", "lut8", "affine"), seed=1)


def test_mixed_widths_and_statistics_equal_the_twin(mixed):
    batch = random_batch(mixed, 150, 3, seed=2)
    batch = batch._replace(slots=torch.arange(150, dtype=torch.int32, device=DEVICE) % 3 - 1)
    stats, expected = (RoutingStats.zeros(2, 1, 8, device=DEVICE) for _ in range(2))
    out = run(mixed, batch, stats=stats)
    assert_close(out, reference(mixed, batch), batch.x.dtype)
    assert_close(out, fused_moe_reference(Call(*batch, **mixed.layer.arguments(mixed.tables, expected))))
    assert torch.equal(stats.counts, expected.counts)
    for name in ("mass", "features"):
        assert_close(getattr(stats, name), getattr(expected, name), batch.x.dtype)


def test_placement_and_all_that_nothing_owns_change_no_bit():
    shape = MoeLayer(0, 3, 200, 140)
    books = ("lut16", "affine")
    layers = [random_layer(shape, (3, 6), books, seed=1, placement=p, poison=byte) for p, byte in ((0, 0), (1, 255))]
    batch = random_batch(layers[0], 90, 2, seed=2)
    first, second = (run(layer, batch) for layer in layers)
    assert torch.equal(first, second)


def test_foreign_and_repeated_ids(mixed):
    batch = random_batch(mixed, 70, 2, seed=3)
    ids = batch.ids.int()
    ids[:20] = -1
    ids[20:30, 1] = ids[20:30, 0]
    ids[30:40, 0] = 99
    batch = batch._replace(ids=ids)
    out = run(mixed, batch)
    assert_close(out, reference(mixed, batch), batch.x.dtype)
    assert not out[:20].any()


@pytest.mark.parametrize(
    ("activation", "gated", "limit", "biases"),
    [
        ("gelu_tanh", True, 0.0, ()),
        ("relu2", False, 0.0, ()),
        ("gpt_oss", True, 7.0, ("gate_up_bias", "down_bias")),
        ("clamped_silu", True, 1.5, ("down_bias",)),
    ],
)
def test_every_gate_and_bias(activation, gated, limit, biases):
    shape = MoeLayer(0, 3, 320, 192, activation, gated, limit)
    layer = random_layer(shape, (4,), ("lut8",), seed=5, biases=biases)
    batch = random_batch(layer, 100, 2, seed=6)
    assert_close(run(layer, batch), reference(layer, batch), batch.x.dtype)


def test_a_captured_graph_follows_the_tables():
    shape, books = MoeLayer(0, 4, 256, 192), ("lut8", "affine")
    layer, other = (random_layer(shape, (3, 6), books, seed=seed) for seed in (7, 8))
    batch = random_batch(layer, 96, 3, seed=7)
    run(layer, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(layer, batch)
    for tensor, value in zip(layer.tables[:3], other.tables[:3], strict=True):
        tensor.copy_(value)
    graph.replay()
    assert torch.equal(out, run(other, batch))


def test_the_op_takes_this_path_above_the_small_batches(mixed):
    from pagedweight.kernels.prefill.launch import launch_prefill_moe
    from pagedweight.kernels.regimes import choose_regime

    x = random_batch(mixed, 65, 1).x
    assert choose_regime(x) is launch_prefill_moe
    assert choose_regime(x.float()) is not launch_prefill_moe
