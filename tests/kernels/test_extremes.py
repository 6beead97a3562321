"""Weights, inputs and sizes at the edges of what a number can be, on every path of the op."""

from __future__ import annotations

import pytest
import torch

from pagedweight.kernels.ops import fused_moe
from pagedweight.layout import MoeLayer, RoutingStats
from tests.kernels.decode.support import DEVICE, MANY, ONE, Batch, Placed, random_batch, random_layer
from tests.kernels.decode.support import run as run_decode
from tests.support import TOLERANCES, run_kernel, run_twin

# Each with its token's other weight as it was.
EXTREMES = (float("nan"), 1e30, -1.0, 0.0, 1e-30, 1e-45, -0.0, -1e30, float("inf"), float("-inf"))
SHAPE, ON_A_GPU = MoeLayer(0, 3, 64, 48), MoeLayer(0, 6, 256, 192)
DTYPES = torch.float32, torch.bfloat16, torch.float16


def placed(seed: int = 3) -> Placed:
    return random_layer(SHAPE, (3, 4), seed=seed)


def extreme(layer: Placed, dtype: torch.dtype, tokens: int) -> tuple[Batch, Batch]:
    """A batch, and the same with extreme weights in its first tokens; the others are what must not change."""
    batch = random_batch(layer, tokens, 2, seed=4, dtype=dtype)
    weights = batch.weights.clone()
    count = min(len(EXTREMES), tokens - 1) if tokens > 1 else 1
    weights[:count, 0] = torch.tensor(EXTREMES[:count], device=weights.device)
    return batch, batch._replace(weights=weights)


def expected(layer: Placed, batch: Batch) -> torch.Tensor:
    """fp64, then rounded to the input's type, in which large values are infinite."""
    x, ids, weights, _ = (tensor.cpu() for tensor in batch)
    return layer.layer.moe(x, ids, weights.double(), layer.bits).to(batch.x.dtype).float()


def check_rows(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Every row by its own scale: a huge one must not hide its neighbours' errors."""
    out, want = out.float().cpu(), want.float().cpu()
    finite = want.isfinite().all(1)
    assert torch.equal(out.isfinite().all(1), finite)
    error = (out - want)[finite].abs().amax(1)
    assert (error <= TOLERANCES[dtype] * want[finite].abs().amax(1)).all()


def test_extreme_weights_are_what_arithmetic_makes_of_them() -> None:
    layer, dtype = placed(), torch.float32
    clean, batch = extreme(layer, dtype, 13)
    for run in (run_twin, run_kernel):
        plain = [tensor.cpu() for tensor in batch[:3]]
        got = run(layer.layer, layer.tables, *plain)
        check_rows(got.out, expected(layer, batch), dtype)
        usual = run(layer.layer, layer.tables, *(tensor.cpu() for tensor in clean[:3]))
        assert torch.equal(got.out[len(EXTREMES) :], usual.out[len(EXTREMES) :])
        assert got.stats.mass.isfinite().all()
        assert int(got.stats.counts.sum()) == 2 * 13 - 3  # what is no number is not counted


@pytest.mark.parametrize(("tokens", "config"), [(1, ONE), (4, MANY)])
def test_extreme_weights_in_the_decode_kernels(tokens: int, config) -> None:
    layer = placed()
    clean, batch = extreme(layer, torch.float16, tokens)
    stats = RoutingStats.zeros(1, 1, SHAPE.experts, device=DEVICE)
    out = run_decode(layer, batch, config, stats)
    check_rows(out, expected(layer, batch), torch.float16)
    if tokens > 1:
        assert torch.equal(out[-1:], run_decode(layer, clean, config)[-1:])
    assert stats.mass.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 13, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_weights_through_the_op(dtype: torch.dtype, tokens: int) -> None:
    layer = random_layer(ON_A_GPU, (3, 4), seed=3)
    clean, batch = extreme(layer, dtype, tokens)
    outs = []
    for one in (batch, clean):
        stats = RoutingStats.zeros(1, 1, 6, device=DEVICE)
        outs.append(fused_moe(*one, **layer.layer.arguments(layer.tables, stats)))
    check_rows(outs[0], expected(layer, batch), dtype)
    assert torch.equal(outs[0][len(EXTREMES) :], outs[1][len(EXTREMES) :])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [13, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_rows_stay_their_own_through_the_op(dtype: torch.dtype, tokens: int) -> None:
    """NaN and infinities in inputs, decode and prefill alike."""
    layer = random_layer(ON_A_GPU, (3, 4), seed=5)
    batch = random_batch(layer, tokens, 2, seed=6, dtype=dtype)
    stats = RoutingStats.zeros(1, 1, 6, device=DEVICE)
    clean = fused_moe(*batch, **layer.layer.arguments(layer.tables, stats))
    batch.x[0, 3], batch.x[5, 7], batch.x[7] = float("nan"), float("inf"), float("-inf")
    spoiled = fused_moe(*batch, **layer.layer.arguments(layer.tables, stats))
    bad = torch.zeros(tokens, dtype=torch.bool, device=DEVICE)
    bad[[0, 5, 7]] = True
    assert torch.equal(spoiled[~bad], clean[~bad])
    assert not spoiled[bad].isfinite().all(1).any()
    assert all(tensor.isfinite().all() for tensor in stats)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 13, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_runs_and_other_company_give_equal_bits(dtype: torch.dtype, tokens: int) -> None:
    """In batches of one size a row's answer does not depend on who else is there, or on when it is asked."""
    layer = random_layer(ON_A_GPU, (3, 4), seed=7)
    batch, others = (random_batch(layer, tokens, 2, seed=seed, dtype=dtype) for seed in (8, 9))
    mixed = Batch(*(torch.cat([a[:1], b[1:]]) for a, b in zip(batch, others, strict=True)))

    def run(one: Batch) -> torch.Tensor:
        stats = RoutingStats.zeros(1, 1, 6, device=DEVICE)
        return fused_moe(*one, **layer.layer.arguments(layer.tables, stats))

    first = run(batch)
    assert all(torch.equal(run(batch), first) for _ in range(20))
    assert torch.equal(run(mixed)[:1], first[:1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tokens", "hidden", "intermediate"),
    [
        (torch.bfloat16, 1_050_000, 2064, 32),  # T * H beyond 2^31
        (torch.float32, 530_000, 4104, 32),  # and in the grouped kernels
        (torch.bfloat16, 70_000, 512, 352),  # more tokens than a grid dimension may have
    ],
)
def test_products_of_sizes_beyond_32_bits(dtype: torch.dtype, tokens: int, hidden: int, intermediate: int) -> None:
    layer = random_layer(MoeLayer(0, 4, hidden, intermediate), (2, 3), seed=11)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator, device=DEVICE, dtype=dtype)
    ids = torch.rand(tokens, 4, generator=generator, device=DEVICE).argsort(1)[:, :2]
    weights = torch.rand(tokens, 2, generator=generator, device=DEVICE)
    batch = Batch(x, ids, weights, torch.zeros(tokens, dtype=torch.int32, device=DEVICE))
    stats = RoutingStats.zeros(1, 1, 4, device=DEVICE)
    out = fused_moe(*batch, **layer.layer.arguments(layer.tables, stats))
    for rows in (slice(0, 100), slice(tokens // 2, tokens // 2 + 100), slice(tokens - 100, tokens)):
        part = Batch(*(tensor[rows] for tensor in batch))
        check_rows(out[rows], expected(layer, part), dtype)
    assert int(stats.counts.sum()) == 2 * tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 13, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_arena_of_more_than_2_31_bytes(dtype: torch.dtype, tokens: int) -> None:
    """Frames and tables at offsets beyond 2^32 of one arena, in the order in which they came."""
    layer = random_layer(ON_A_GPU, (3, 4), seed=13)
    batch = random_batch(layer, tokens, 2, seed=14, dtype=dtype)
    near = fused_moe(*batch, **layer.layer.arguments(layer.tables, RoutingStats.zeros(1, 1, 6, device=DEVICE)))
    held = layer.tables.memory.numel()
    beyond = -(-(2**32 + 12345) // layer.frame_bytes) * layer.frame_bytes
    memory = torch.empty(beyond + held, dtype=torch.uint8, device=DEVICE)
    memory[beyond:] = layer.tables.memory
    shift = memory.data_ptr() + beyond - layer.tables.memory.data_ptr()
    far = layer.tables._replace(
        frame_address=layer.tables.frame_address + shift,
        table_address=layer.tables.table_address + shift,
        memory=memory,
    )
    layer.tables.memory.fill_(0xFF)  # so that nobody reads there
    out = fused_moe(*batch, **layer.layer.arguments(far, RoutingStats.zeros(1, 1, 6, device=DEVICE)))
    assert torch.equal(out, near)
