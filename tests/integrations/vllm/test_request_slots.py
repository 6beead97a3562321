"""Statistics of requests kept apart, and merged by the KV blocks that they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.experts import TokenSlots
from pagedweight.integrations.vllm.rank_signals import RankSignals
from pagedweight.integrations.vllm.request_slots import BatchSlots, RequestSlots
from pagedweight.layout import RoutingStats

SLOTS, LAYERS, EXPERTS = 3, 2, 4


class Rank:
    """A rank whose experts are always one for each request: its number."""

    def __init__(self) -> None:
        self.tokens = TokenSlots(64)
        self.stats = RoutingStats.zeros(SLOTS, LAYERS, EXPERTS)
        self.batch = BatchSlots(self.tokens, self.stats)

    def forward(self, experts: dict[str, int], tokens: dict[str, int]) -> None:
        self.batch.mark(list(tokens), np.array(list(tokens.values())))
        expert_of = np.repeat([experts[request] for request in tokens], list(tokens.values()))
        padded = self.tokens.view(sum(tokens.values()) + 2).tolist()
        assert padded[-2:] == [-1, -1]
        for slot, expert in zip(padded, expert_of, strict=False):
            self.stats.mass[slot, :, expert] += 1
            self.stats.counts[slot, :, expert] += 1


@given(st.lists(st.sets(st.sampled_from("abcdef")), max_size=12))
def test_running_requests_have_slots_and_ranks_know_them(steps: list[set[str]]) -> None:
    engine, rank = RequestSlots(SLOTS), Rank()
    for running in steps:
        rank.batch.seat(engine.follow(running))
        rank.batch.mark(sorted(running), np.ones(len(running), dtype=np.int64))
        slots = rank.tokens.view(64)[: len(running)].tolist()
        held = engine.kv_blocks(lambda request: 1)
        assert held.tolist() == [slots.count(n) for n in range(SLOTS)]


def test_a_request_gets_a_slot_of_its_own_while_there_is_one() -> None:
    engine = RequestSlots(SLOTS)
    entered = engine.follow("abcde").entered
    assert sorted(slot for _, slot in entered) == [0, 0, 1, 1, 2]
    engine.follow("a")
    ((_, slot),) = engine.follow("af").entered
    assert slot != dict(entered)["a"]


def test_mass_is_merged_by_the_blocks_that_requests_hold() -> None:
    engine, rank = RequestSlots(SLOTS), Rank()
    rank.batch.seat(engine.follow(["long", "short"]))
    rank.forward({"long": 0, "short": 3}, {"long": 1, "short": 20})
    signals = RankSignals(rank.stats)
    held = engine.kv_blocks({"long": 9, "short": 1}.__getitem__)
    by_blocks = signals.read(log_features=False, kv_blocks=held).mass
    torch.testing.assert_close(by_blocks, torch.tensor([[0.9, 0, 0, 0.1]] * LAYERS))


def test_what_a_request_left_behind_is_not_its_successors() -> None:
    engine, rank = RequestSlots(SLOTS), Rank()
    rank.batch.seat(engine.follow(["a", "b"]))
    rank.forward({"a": 0, "b": 1}, {"a": 5, "b": 5})
    rank.batch.seat(engine.follow(["b", "c"]))
    rank.forward({"b": 1, "c": 2}, {"b": 5, "c": 5})
    assert rank.stats.mass[:, 0].sum(0).tolist() == [0, 10, 5, 0]


def test_a_request_that_has_no_slot_is_an_error() -> None:
    with pytest.raises(KeyError, match="unknown"):
        Rank().batch.mark(["unknown"], np.array([1]))
