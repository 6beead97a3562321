"""Corrections of many comparisons: what they keep, and that they hold their level where nothing differs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.comparisons import LEVEL, benjamini_hochberg, chance_of_more, holm

CHANCES = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30)


@given(CHANCES)
def test_holm_keeps_no_more_than_benjamini_and_hochberg_nor_they_than_no_correction(chances: list[float]) -> None:
    strict, loose = holm(chances), benjamini_hochberg(chances)
    assert not (strict & ~loose).any()
    assert not (loose & (np.array(chances) > LEVEL)).any()


@given(CHANCES, st.randoms())
def test_the_order_of_comparisons_does_not_matter(chances: list[float], random) -> None:
    order = list(range(len(chances)))
    random.shuffle(order)
    for correct in (holm, benjamini_hochberg):
        np.testing.assert_array_equal(correct([chances[i] for i in order]), correct(chances)[order])


def test_corrections_are_the_textbooks() -> None:
    chances = [0.001, 0.012, 0.014, 0.015, 0.6]
    assert holm(chances).tolist() == [True, True, True, True, False]  # 0.05 / 5, / 4, / 3, / 2, / 1
    assert holm([0.02, 0.02, 0.02]).tolist() == [False, False, False]
    assert benjamini_hochberg([0.02, 0.02, 0.02]).tolist() == [True, True, True]
    assert benjamini_hochberg([0.04, 0.01, 0.9]).tolist() == [False, True, False]


def test_a_chance_is_the_share_of_signs_that_do_as_well() -> None:
    other = np.zeros(4)
    assert abs(chance_of_more(np.ones(4), other) - 1 / 16) < 0.005
    assert chance_of_more(-np.ones(4), other) == 1.0


def test_where_nothing_differs_holm_seldom_finds_anything() -> None:
    alarms = 0
    for seed in range(100):
        drawn = np.random.default_rng(seed)
        own, other = drawn.lognormal(0, 1, (2, 20, 24))
        chances = [chance_of_more(a, b, seed, rounds=2000) for a, b in zip(own, other, strict=True)]
        alarms += holm(chances).any()
    assert alarms <= 12  # 5 expected; more than 12 in one of a thousand
