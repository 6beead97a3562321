"""GreedySelect of Algorithm 1: the cheapest steps by predicted damage per byte until a byte target is met.

Single-bit steps of a row need not get dearer with depth, so a step is a segment of the row's lower convex hull in
(bytes, damage): every prefix of the steps in order of slope is then the cheapest way to release its bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np


class Steps(NamedTuple):
    """Hull segments of all rows, cheapest first, equal ones by row; a row's segments keep their order.

    row, to: (S,), the row and the width index that the step ends at.
    bytes, damage: float64 (S,), totals of this step and all before it; bytes are whole numbers.
    """

    row: np.ndarray
    to: np.ndarray
    bytes: np.ndarray
    damage: np.ndarray

    def meeting(self, target_bytes: int, taken: int = 0) -> int:
        """Number of steps that release at least target_bytes beyond the first `taken`; all where that is not enough."""
        if target_bytes <= 0:
            return taken
        before, _ = self.totals(taken)
        return min(int(np.searchsorted(self.bytes, before + target_bytes)) + 1, len(self.row))

    def taken(self, start: np.ndarray, index: np.ndarray) -> int | None:
        """How many of the first steps lead from start (R,) to index (R,); None where no number of them does."""
        # Along the steps of a prefix rows are where they led, after it none is: the place of change is searched.
        steps = range(len(self.row))
        taken = bisect_left(steps, True, key=lambda step: bool(self.to[step] < index[self.row[step]]))
        return taken if (self.reached(start, taken) == index).all() else None

    def reached(self, start: np.ndarray, count: int) -> np.ndarray:
        """(R,) width index of every row after the first count steps, from start (R,)."""
        index = start.copy()
        index[self.row[:count]] = self.to[:count]
        return index

    def totals(self, count: int) -> tuple[int, float]:
        """Bytes and damage of the first count steps."""
        return (int(self.bytes[count - 1]), float(self.damage[count - 1])) if count else (0, 0.0)


class _Segments(NamedTuple):
    """Hull segments by their place in each row's order, (W - 1, R); slope is infinite where a row has no more.

    bytes, damage: what the segment alone releases and costs. to: int8, the width index that it ends at.
    """

    slope: np.ndarray
    bytes: np.ndarray
    damage: np.ndarray
    to: np.ndarray


def hull_steps(bytes_: np.ndarray, damage: np.ndarray) -> Steps:
    """Sorted hull segments of every row, lowering it from where it is.

    bytes_, damage: float64 (W, R), each width's totals measured from where the row is. bytes_ is 0 there and above, and
    where a width is not legal; damage is 0 there. Of equally cheap segments the nearest is taken.
    """
    segments, convex = _single_steps(bytes_, damage)
    bent = np.flatnonzero(~convex)
    if bent.size:
        _walk_hulls(segments, bytes_, damage, bent)
    return _sorted_steps(segments)


def _single_steps(bytes_: np.ndarray, damage: np.ndarray) -> tuple[_Segments, np.ndarray]:
    """Every row's single-width steps, and bool (R,) whether its hull consists of them, as most do."""
    widths, rows = bytes_.shape
    run, rise = bytes_[-2::-1] - bytes_[:0:-1], damage[-2::-1] - damage[:0:-1]
    taken = run > 0
    slope = np.divide(rise, run, out=np.full(run.shape, np.inf), where=taken)
    convex = np.count_nonzero(taken, axis=0) == np.count_nonzero(bytes_, axis=0)
    if widths > 2:
        convex &= ~((slope[1:] < slope[:-1]) & taken[:-1]).any(axis=0)
    to = np.repeat(np.arange(widths - 2, -1, -1, dtype=np.int8), rows).reshape(run.shape)
    return _Segments(slope, run, rise, to), convex


def _walk_hulls(segments: _Segments, bytes_: np.ndarray, damage: np.ndarray, rows: np.ndarray) -> None:
    """Overwrite some rows' segments: from where each row is, again and again the cheapest way on, to any width."""
    segments.slope[:, rows] = np.inf
    bytes_, damage = bytes_[:, rows], damage[:, rows]
    at_bytes, at_damage, last = np.zeros(len(rows)), np.zeros(len(rows)), np.full(len(rows), -np.inf)
    for place in range(len(bytes_) - 1):
        slope, to = _cheapest_next(bytes_, damage, at_bytes, at_damage)
        going = np.flatnonzero(np.isfinite(slope))
        if not going.size:
            break
        bytes_, damage, rows, to = bytes_[:, going], damage[:, going], rows[going], to[going]
        everyone = np.arange(len(going))
        to_bytes, to_damage = bytes_[to, everyone], damage[to, everyone]
        # Rounding may make a later segment look cheaper by one unit in the last place; it still comes later.
        last = np.maximum(slope[going], last[going])
        found = (last, to_bytes - at_bytes[going], to_damage - at_damage[going], to)
        for values, column in zip(segments, found, strict=True):
            values[place, rows] = column
        at_bytes, at_damage = to_bytes, to_damage


def _cheapest_next(
    bytes_: np.ndarray, damage: np.ndarray, at_bytes: np.ndarray, at_damage: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least slope from where each row is to any width beyond it, infinite where there is none; that width's index."""
    best, to = np.full(len(at_bytes), np.inf), np.zeros(len(at_bytes), dtype=np.int8)
    for width in reversed(range(len(bytes_))):
        run = bytes_[width] - at_bytes
        slope = np.divide(damage[width] - at_damage, run, out=np.full(len(run), np.inf), where=run > 0)
        cheaper = slope < best
        best[cheaper], to[cheaper] = slope[cheaper], width
    return best, to


def _sorted_steps(found: _Segments) -> Steps:
    row, place = sorted_places(found.slope)
    at = place * found.slope.shape[1]
    at += row
    bytes_, damage, to = (values.reshape(-1).take(at) for values in found[1:])
    return Steps(row, to, np.cumsum(bytes_), np.cumsum(damage))


def sorted_places(slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and place of every finite slope (places, R), ascending; equal ones by row, then by place.

    Sorting values is several times faster than sorting indices, so each slope carries its row and place in its last
    bits: slopes closer than that (a relative 2^-30 even at 2^20 rows) count as equal.
    """
    places, rows = slope.shape
    place_bits = max(places - 1, 0).bit_length()
    own_bits = place_bits + max(rows - 1, 0).bit_length()
    # As integers, IEEE 754 numbers are in order but for the negative ones, which are the wrong way round.
    key = (slope + 0.0).view(np.int64)
    key ^= (key >> 63) & np.iinfo(np.int64).max
    key &= -(1 << own_bits)
    key |= np.arange(rows) << place_bits
    key |= np.arange(places)[:, None]
    key = key.reshape(-1)
    key.sort()
    key = key[: np.count_nonzero(slope < np.inf)]
    key &= (1 << own_bits) - 1
    return key >> place_bits, key & ((1 << place_bits) - 1)
