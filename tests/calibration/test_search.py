"""The search keeps what pays, records everything, and never ends worse than it began."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.calibration.search import LEAST_GAIN, candidates, search_policy, trial_count
from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy


def policy(confidence: float = 0.5) -> Policy:
    widths = (2, 3, 4, 5, 6)
    layout = Layout((MoeLayer(0, 4, 8, 8),), widths, dict.fromkeys(widths, "lut16"))
    plain = Policy.from_sensitivity(layout, np.ones((8, 5)), np.full(8, 0.25))
    return plain.replaced(head_confidence=np.full((2, 5, 5), confidence), alpha=1.0)


@given(st.integers(0, 1000))
def test_a_search_never_ends_worse_than_it_began(seed: int) -> None:
    def score(tried: Policy) -> tuple[float, ...]:
        drawn = np.random.default_rng([seed, int(1000 * tried.alpha), len(tried.multipliers), len(tried.floors)])
        return tuple(drawn.uniform(0.5, 1.5, 2))

    found, trials = search_policy(policy(), score)
    first = np.array(trials[0].kl_nats)
    assert len(trials) == trial_count(policy())
    assert np.mean(np.array(score(found)) / first) <= 1
    kept = [trial for trial in trials if trial.kept]
    assert all(a.score - b.score > LEAST_GAIN for a, b in pairwise(kept))
    assert np.mean(np.array(score(found)) / first) == kept[-1].score


def test_settings_that_pay_are_all_found() -> None:
    def score(tried: Policy) -> tuple[float, ...]:
        hot = tried.multipliers[-1] > 1
        return (
            1.0 - 0.1 * tried.alpha - 0.2 * hot - 0.1 * (len(tried.floors) > 1) - 0.1 * (len(tried.depth_caps) > 1),
        )

    found, _ = search_policy(policy(), score)
    assert found.alpha == 1.0
    assert found.multipliers[-1] > 1
    assert found.floors.shape == (2, len(found.multipliers))
    assert found.depth_caps.shape[1] == len(found.multipliers)


def test_nothing_is_kept_for_noise() -> None:
    found, trials = search_policy(policy(), lambda tried: (1.0 - 0.004 * tried.alpha,))
    assert found.alpha == 0
    assert [trial.kept for trial in trials[1:]] == [False] * (len(trials) - 1)


def test_a_policy_without_heads_is_not_searched_for_their_strength() -> None:
    names = [set(settings) for group in candidates(policy(confidence=0)) for settings in group]
    assert {"alpha"} not in names
