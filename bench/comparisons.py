"""Many paired comparisons at once: which of them say that one policy loses more than another, and which by chance.

A 95 % interval leaves out the truth on one side in one comparison of forty. A table of a hundred comparisons has such
cells even where nothing differs, so what it says of "nowhere" or "in these cells" needs a correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

CHANCE_ABOVE = 0.025  # of one comparison without a difference, to lie above its two-sided 95 % interval
LEVEL = 0.05  # of false alarms: any at all after Holm, their share of all alarms after Benjamini and Hochberg
ROUNDS = 20_000


def chance_of_more(own: np.ndarray, other: np.ndarray, seed: int = 0, rounds: int = ROUNDS) -> float:
    """One-sided p: how often a mean difference as large as own's over other's comes about when signs are drawn.

    own, other: (n,) figures of the same items. Never 0: the signs that were seen count as one draw.
    """
    difference = np.asarray(own, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    reached = np.count_nonzero(
        _signs(len(difference), seed, rounds) @ difference >= difference.sum() - 1e-12 * np.abs(difference).sum()
    )
    return (reached + 1) / (rounds + 1)


@lru_cache(maxsize=4)
def _signs(items: int, seed: int, rounds: int) -> np.ndarray:
    """float64 (rounds, items) of -1 and 1, the same for all comparisons of as many items."""
    return 2.0 * np.random.default_rng(seed).integers(0, 2, (rounds, items), dtype=np.int8) - 1.0


def holm(chances: Sequence[float], level: float = LEVEL) -> np.ndarray:
    """bool (N,): alarms of which none is false with probability 1 - level, whatever depends on whatever."""
    p = np.asarray(chances, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    kept = np.logical_and.accumulate(p[order] <= level / np.arange(len(p), 0, -1))
    return _unsorted(kept, order)


def benjamini_hochberg(chances: Sequence[float], level: float = LEVEL) -> np.ndarray:
    """bool (N,): alarms of which a share of `level` is expected to be false."""
    p = np.asarray(chances, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    passing = p[order] <= level * np.arange(1, len(p) + 1) / max(1, len(p))
    kept = np.arange(len(p)) < (np.flatnonzero(passing)[-1] + 1 if passing.any() else 0)
    return _unsorted(kept, order)


def _unsorted(kept: np.ndarray, order: np.ndarray) -> np.ndarray:
    out = np.zeros(len(order), dtype=bool)
    out[order] = kept
    return out
