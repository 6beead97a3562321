"""ArenaCache gives the tokens of DynamicCache, takes frames as sequences grow, and gives every one of them back."""

from __future__ import annotations

import copy
import gc
import inspect

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer

from pagedweight.integrations.hf_cache import ArenaCache
from pagedweight.integrations.hf_cache_layers import ArenaSlidingLayer
from pagedweight.integrations.hf_probe import layer_shapes, probe_shapes
from pagedweight.integrations.kv_places import Places, SlabShape
from pagedweight.integrations.kv_pool import FrameHoldings, KVPool
from pagedweight.integrations.kv_slab import Slab, Span, grow
from pagedweight.runtime.frames import Arena, OutOfFrames, OwnerKind
from pagedweight.runtime.transfer import ImmediateEngine
from tests.hf_models import gemma4_g16, mixtral_m8, qwen2_moe_q60, tokens

FRAME_BYTES = 512
WINDOW = 16


# Experts do not touch the cache: one per token, so that generating stays quick.
MAKE = {
    "M8": lambda: mixtral_m8(num_local_experts=2, num_experts_per_tok=1),
    "M8 sliding": lambda: mixtral_m8(num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW),
    "Q60": lambda: qwen2_moe_q60(num_experts=2, num_experts_per_tok=1),
    "G16": lambda: gemma4_g16(num_experts=2, top_k_experts=1),
}


@pytest.fixture(scope="module", params=list(MAKE))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MAKE[request.param]()


def make_pool(model: PreTrainedModel, frames: int = 4096, frame_bytes: int = FRAME_BYTES) -> KVPool:
    arena = Arena(frames * frame_bytes, frame_bytes)
    arena.memory.fill_(0xFF)  # NaN in fp32: what no token wrote must not reach attention
    return KVPool(arena, probe_shapes(model), block_tokens=16)


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def both_ways(model: PreTrainedModel, prompt: torch.Tensor, **settings) -> tuple[torch.Tensor, torch.Tensor, KVPool]:
    """Tokens with DynamicCache, tokens with ArenaCache, and the pool after the cache is gone."""
    pool = make_pool(model)
    outputs = []
    for cache in (DynamicCache(config=model.config), ArenaCache(pool, model.config)):
        torch.manual_seed(1)
        outputs.append(model.generate(prompt, **cache_argument(model, cache), **settings))
    return outputs[0], outputs[1], pool


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 5},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_tokens_of_dynamic_cache(model: PreTrainedModel, mode: str) -> None:
    expected, got, pool = both_ways(model, tokens(2, 9), max_new_tokens=16, **MODES[mode])
    assert torch.equal(got, expected)
    pool.collect()
    assert pool.arena.free_frames == pool.arena.frames


def test_tokens_stay_the_same_while_frames_move_between_forwards(model: PreTrainedModel) -> None:
    prompt, settings = tokens(2, 9), {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(prompt, **settings)
    pool = make_pool(model)
    arena, rng, moved = pool.arena, np.random.default_rng(0), []

    def shuffle(*_: object) -> None:
        """A third of the KV frames go elsewhere, and what they leave behind is poisoned."""
        held, free = (np.flatnonzero(arena.kinds == kind) for kind in (OwnerKind.KV, OwnerKind.FREE))
        sources = rng.permutation(held)[: len(held) // 3]
        if len(sources):
            targets = rng.permutation(free)[: len(sources)]
            ImmediateEngine(arena).relocate(sources, targets)
            arena.rows[torch.from_numpy(sources)] = 0xFF
            pool.follow(sources, targets)
            arena.move(sources, targets)
            moved.append(len(sources))

    hook = model.register_forward_pre_hook(shuffle)
    try:
        got = model.generate(prompt, **cache_argument(model, ArenaCache(pool, model.config)), **settings)
    finally:
        hook.remove()
    assert torch.equal(got, expected)
    assert sum(moved) > 100
    arena.check()
    pool.collect()
    assert arena.free_frames == arena.frames


def test_left_padding_gives_the_tokens_of_dynamic_cache(model: PreTrainedModel) -> None:
    prompt = tokens(3, 11)
    mask = torch.ones_like(prompt)
    for row, padding in enumerate((0, 4, 9)):
        mask[row, :padding], prompt[row, :padding] = 0, 0
    expected, got, _ = both_ways(model, prompt, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)


def test_assisted_decoding_crops_to_the_same_tokens(model: PreTrainedModel) -> None:
    if not hasattr(DynamicSlidingWindowLayer, "activate_past_recording") and model.config.sliding_window is not None:
        pytest.skip("this transformers cannot crop its own sliding layers")
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    expected, got, _ = both_ways(model, tokens(1, 13), assistant_model=assistant, max_new_tokens=14, do_sample=False)
    assert torch.equal(got, expected)


def forward(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=True, **cache_argument(model, cache)).logits


def test_case_93_a_sliding_layer_holds_its_window_only() -> None:
    model = MAKE["G16"]()
    if not DynamicCache(config=model.config).layers:
        pytest.skip("this transformers keeps every token of Gemma 4's sliding layers")
    pool = make_pool(model)
    cache = ArenaCache(pool, model.config)
    for position in range(40):
        forward(model, cache, tokens(1, 40)[:, position : position + 1])
    sliding, full = cache.layers
    assert [slab.tokens for slab in sliding._slabs] == [WINDOW - 1] * 2
    assert [slab.tokens for slab in full._slabs] == [40] * 2
    per_frame = FRAME_BYTES // pool.layers[0][0].token_bytes
    assert cache.held_bytes == 2 * FRAME_BYTES * (-(-40 // per_frame) + -(-40 // per_frame) - (40 - 15) // per_frame)
    assert pool.arena.bytes_by_owner()["kv"] == cache.held_bytes
    assert cache.get_seq_length() == 40


def test_frames_are_taken_as_the_sequence_grows_and_never_all_at_once(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    cache = ArenaCache(pool, model.config)
    held = []
    for position in range(12):
        promised = cache.missing_frames(2, 1)
        before = pool.arena.free_frames
        forward(model, cache, tokens(2, 12)[:, position : position + 1])
        assert before - pool.arena.free_frames == promised
        held.append(cache.held_bytes)
    assert held == sorted(held)
    assert held[0] < held[-1]


def test_reserving_takes_what_the_forward_needs(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    cache = ArenaCache(pool, model.config)
    ids = tokens(2, 50)
    for part in (ids[:, :30], ids[:, 30:33], ids[:, 33:50]):
        cache.reserve(*part.shape)
        free = pool.arena.free_frames
        forward(model, cache, part)
        assert pool.arena.free_frames >= free


class Launches(TorchDispatchMode):
    """Keeps what is asked of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_cache_that_grows_launches_nothing_before_its_forward(model: PreTrainedModel) -> None:
    cache = ArenaCache(make_pool(model), model.config)
    with Launches() as launches:
        for count in range(16, 80, 16):
            cache.reserve(1, count)
    assert cache.held_bytes > 0
    assert launches.seen == []
    expected = forward(model, DynamicCache(config=model.config), tokens(1, 64))
    assert torch.equal(forward(model, cache, tokens(1, 64)), expected)


def test_a_reservation_for_a_forward_that_never_ran_is_replaced() -> None:
    model = MAKE["G16"]()
    pool = make_pool(model)
    cache = ArenaCache(pool, model.config)
    cache.reserve(3, 40)
    expected = forward(model, DynamicCache(config=model.config), tokens(2, 9))
    cache.reserve(2, 9)
    assert torch.equal(forward(model, cache, tokens(2, 9)), expected)
    cache.release()
    assert pool.arena.free_frames == pool.arena.frames


def test_another_batch_is_refused_before_anything_is_taken(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    cache = ArenaCache(pool, model.config)
    forward(model, cache, tokens(2, 5))
    held = cache.held_bytes
    for ask in (cache.missing_frames, cache.reserve):
        with pytest.raises(ValueError, match=r"holds 2 sequences and got 3; reset\(\)"):
            ask(3, 90)
    assert cache.held_bytes == held == pool.arena.bytes_by_owner()["kv"]
    cache.reset()
    assert forward(model, cache, tokens(3, 90)).shape[0] == 3


def test_a_forward_that_ended_half_way_is_noticed_at_the_next() -> None:
    model = MAKE["M8"]()
    cache = ArenaCache(make_pool(model), model.config)
    forward(model, cache, tokens(1, 5))
    fault = model.model.layers[1].register_forward_pre_hook(raise_in_forward)
    with pytest.raises(RuntimeError, match="in the second layer"):
        forward(model, cache, tokens(1, 3))
    fault.remove()
    with pytest.raises(ValueError, match=r"5 tokens in some layers and 8 in others.*reset\(\)"):
        cache.missing_frames(1, 3)
    cache.reset()
    expected = forward(model, DynamicCache(config=model.config), tokens(1, 9))
    cache.reserve(1, 9)
    assert torch.equal(forward(model, cache, tokens(1, 9)), expected)


def raise_in_forward(*_args) -> None:
    raise RuntimeError("in the second layer")


def test_repeating_sequences_without_room_leaves_the_cache_as_it_was(model: PreTrainedModel) -> None:
    prefix, tail = tokens(2, 19), tokens(2, 4, seed=5)
    needed = make_pool(model)
    kept = ArenaCache(needed, model.config)
    forward(model, kept, prefix)
    pool = make_pool(model, frames=2 * kept.held_bytes // FRAME_BYTES)  # room for 4 sequences, not for 6
    cache = ArenaCache(pool, model.config)
    forward(model, cache, prefix)
    with pytest.raises(OutOfFrames):
        cache.batch_repeat_interleave(3)
    assert torch.equal(forward(model, cache, tail), forward(model, kept, tail))
    pool.arena.check()


def test_a_batch_that_grows_by_selecting_beyond_the_room_is_refused_until_reset() -> None:
    """The first layer has lost its tokens by then: a forward would attend to the new ones alone."""
    model = MAKE["M8"]()
    cache = ArenaCache(pool := make_pool(model, frames=64), model.config)
    forward(model, cache, tokens(2, 19))
    with pytest.raises(OutOfFrames):
        cache.batch_select_indices(torch.arange(2).repeat(64))
    with pytest.raises(ValueError, match=r"reset\(\)"):
        cache.missing_frames(2, 1)
    cache.reset()
    assert pool.arena.free_frames == pool.arena.frames
    cache.reserve(1, 9)
    assert cache.missing_frames(1, 9) == 0


def test_reset_gives_every_frame_back_and_the_cache_serves_again(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    cache = ArenaCache(pool, model.config)
    first = forward(model, cache, tokens(2, 21))
    cache.reset()
    assert (pool.arena.free_frames, cache.get_seq_length(), cache.held_bytes) == (pool.arena.frames, 0, 0)
    assert torch.equal(forward(model, cache, tokens(2, 21)), first)


def test_a_dropped_cache_gives_its_frames_back_at_the_next_collect(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    cache = ArenaCache(pool, model.config)
    forward(model, cache, tokens(1, 8))
    cycle = [cache]
    cycle.append(cycle)
    del cache, cycle
    gc.collect()
    pool.collect()
    assert pool.arena.free_frames == pool.arena.frames
    pool.arena.check()


class NothingLeft:
    """Weights that are at their floor already."""

    def __init__(self) -> None:
        self.asked_frames: list[int] = []

    def ensure_bytes(self, wanted_bytes: int) -> None:
        raise OutOfFrames("nothing left")

    def allocate_kv(self, frames: int) -> np.ndarray:
        self.asked_frames.append(frames)
        raise OutOfFrames("nothing left")


def test_a_full_arena_asks_for_room_once_and_takes_nothing_when_there_is_none(model: PreTrainedModel) -> None:
    pool, weights = make_pool(model, frames=8), NothingLeft()
    pool.draw_on(weights)
    cache = ArenaCache(pool, model.config)
    with pytest.raises(OutOfFrames, match="nothing left"):
        cache.reserve(2, 64)
    assert weights.asked_frames == [cache.missing_frames(2, 64)]
    assert pool.arena.free_frames == 8
    assert cache.get_seq_length() == 0


def test_a_copied_cache_goes_its_own_way(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    prefix, tail = tokens(2, 19), tokens(2, 4, seed=5)
    expected_cache = DynamicCache(config=model.config)
    forward(model, expected_cache, prefix)
    expected = forward(model, expected_cache, tail)
    cache = ArenaCache(pool, model.config)
    forward(model, cache, prefix)
    other = copy.deepcopy(cache)
    forward(model, cache, tokens(2, 7, seed=6))
    assert torch.equal(forward(model, other, tail), expected)


def test_case_83_a_cache_made_inside_inference_mode_serves_outside_and_the_reverse() -> None:
    model = MAKE["G16"]()
    pool = make_pool(model)
    prefix, tail = tokens(2, 19), tokens(2, 4, seed=5)
    expected = forward(model, ArenaCache(pool, model.config), torch.cat([prefix, tail], dim=1))[:, 19:]
    with torch.inference_mode():
        inside = ArenaCache(pool, model.config)
        model(prefix, use_cache=True, **cache_argument(model, inside))
    outside = ArenaCache(pool, model.config)
    forward(model, outside, prefix)
    order = torch.tensor([1, 0])
    inside.reorder_cache(order)
    inside.reorder_cache(order)
    torch.testing.assert_close(forward(model, inside, tail), expected)
    with torch.inference_mode():
        got = model(tail, use_cache=True, **cache_argument(model, outside)).logits
    torch.testing.assert_close(got, expected)


def test_selecting_and_repeating_sequences(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    prefix, tail = tokens(3, 19), tokens(4, 3, seed=5)
    caches = DynamicCache(config=model.config), ArenaCache(pool, model.config)
    logits = []
    for cache in caches:
        forward(model, cache, prefix)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        logits.append(forward(model, cache, tail))
    assert torch.equal(*logits)
    with pytest.raises(ValueError, match="holds 4 sequences and got 1"):
        forward(model, caches[1], tail[:1])


def test_a_token_that_does_not_fit_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="frame_bytes of at least 192"):
        SlabShape(3, 16, torch.float32).tokens_per_frame(128)


def test_a_cache_for_a_model_of_other_layers_is_refused() -> None:
    pool, other = make_pool(MAKE["G16"]()), copy.deepcopy(MAKE["G16"]().config)
    other.num_hidden_layers, other.layer_types = 1, other.layer_types[:1]
    with pytest.raises(ValueError, match="the pool knows 2 cached layers and the model's config 1"):
        ArenaCache(pool, other)


def test_another_kind_of_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 3 keeps a StaticLayer.*patch without budget_bytes"):
        layer_shapes(3, StaticLayer(max_cache_len=8))


def test_a_block_counts_every_layer_in_whole_frames(model: PreTrainedModel) -> None:
    pool = make_pool(model)
    shapes = [shape for pair in pool.layers for shape in pair]
    exact = sum(16 * FRAME_BYTES / (FRAME_BYTES // shape.token_bytes) for shape in shapes)
    assert exact <= pool.block_bytes < exact + FRAME_BYTES
    assert [pool.blocks(pool.block_frames + extra) for extra in (0, 1)] == [1, 2]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("crop"), st.integers(1, 6)),
        st.tuples(st.just("reorder"), st.permutations(range(3))),
        st.tuples(st.just("repeat first"), st.just(0)),
        st.tuples(st.just("window"), st.integers(1, 12)),
    ),
    max_size=12,
)


@given(steps=steps, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_slab_is_a_growing_tensor(steps: list, dtype: torch.dtype) -> None:
    """Any mix of growing, cropping, sliding and reordering leaves what a plain tensor would hold, and no lost frame."""
    arena = Arena(256 * 128, 128)
    pool = KVPool(arena, [(SlabShape(2, 8, dtype),) * 2], block_tokens=4)
    slab = Slab(Places(arena, SlabShape(2, 8, dtype)), holdings := FrameHoldings(arena))
    plain, first = torch.empty(3, 2, 0, 8, dtype=dtype), 0
    for action, value in steps:
        if action == "append":
            new = torch.randn(3, 2, value, 8).to(dtype)
            grow(pool, holdings, [Span(slab, first + plain.shape[2], first + plain.shape[2] + value)], 3)
            slab.write(new)
            plain = torch.cat([plain, new], dim=2)
        elif not plain.shape[2]:
            continue
        elif action == "crop":
            kept = max(0, plain.shape[2] - value)
            slab.drop_from(first + kept)
            plain, first = plain[:, :, :kept], first if kept else 0
        elif action == "window":
            slab.drop_before(first + plain.shape[2] - value)
            gone = max(0, plain.shape[2] - value)
            plain, first = plain[:, :, gone:], first + gone
        else:
            order = torch.tensor(list(value) if action == "reorder" else [0, 0, 0])
            slab.permute(order)
            plain = plain[order]
        assert slab.tokens == plain.shape[2]
        if plain.shape[2]:
            assert torch.equal(slab.read(), plain)
        assert arena.frames - arena.free_frames == 3 * slab.columns == holdings.frames
    arena.check()


def test_the_sliding_layer_must_be_told_before_it_can_go_back() -> None:
    model = MAKE["M8 sliding"]()
    cache = ArenaCache(make_pool(model), model.config)
    forward(model, cache, tokens(1, WINDOW + 3))
    assert isinstance(cache.layers[0], ArenaSlidingLayer)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
