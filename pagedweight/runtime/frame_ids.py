"""Arithmetic on frame ids: runs, parts, and where frames went."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def replaced(frames: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Frame ids of any shape with each of the sources, in any order, replaced by its target."""
    order = np.argsort(sources)
    sources, targets = sources[order], targets[order]
    at = np.minimum(np.searchsorted(sources, frames), len(sources) - 1)
    return np.where(sources[at] == frames, targets[at], frames)


def run_frames(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Ids of all the frames of several runs."""
    starts = np.repeat(firsts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return starts + np.arange(counts.sum())


def parted(firsts: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Ids of the frames of each of several runs."""
    return split(run_frames(firsts, counts), counts)


def split(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Consecutive parts of an array, so many values each."""
    return [values[start:stop] for start, stop in pairwise([0, *np.cumsum(counts).tolist()])]
