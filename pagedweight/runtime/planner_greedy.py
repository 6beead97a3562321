"""GreedySelect of Algorithm 1: the cheapest steps by predicted damage per byte until a byte target is met.

Single-bit steps of a row need not get dearer with depth, so a step is a segment of the row's lower convex hull in
(bytes, damage): every prefix of the steps in order of slope is then the cheapest way to release its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Steps(NamedTuple):
    """Hull segments of all rows, cheapest first, equal ones by row; a row's segments keep their order.

    row, origin, to: (S,), the row and the width indices that the step starts and ends at.
    bytes, damage: float64 (S,), totals of this step and all before it; bytes are whole numbers.
    """

    row: np.ndarray
    origin: np.ndarray
    to: np.ndarray
    bytes: np.ndarray
    damage: np.ndarray

    def meeting(self, target_bytes: int) -> int:
        """Number of steps that release at least target_bytes; all of them when that is not enough."""
        return min(int(np.searchsorted(self.bytes, target_bytes)) + 1, len(self.row)) if target_bytes > 0 else 0

    def reached(self, start: np.ndarray, count: int) -> np.ndarray:
        """(R,) width index of every row after the first count steps, from start (R,)."""
        index = start.copy()
        index[self.row[:count]] = self.to[:count]
        return index

    def totals(self, count: int) -> tuple[int, float]:
        """Bytes and damage of the first count steps."""
        return (int(self.bytes[count - 1]), float(self.damage[count - 1])) if count else (0, 0.0)


class _Segments(NamedTuple):
    """Hull segments in any order, a row's own in hull order."""

    slope: np.ndarray
    row: np.ndarray
    origin: np.ndarray
    to: np.ndarray
    bytes: np.ndarray
    damage: np.ndarray


def hull_steps(bytes_: np.ndarray, damage: np.ndarray, start: np.ndarray) -> Steps:
    """Sorted hull segments of every row, lowering it from width index start (R,).

    bytes_, damage: float64 (W, R), each width's totals measured from start. bytes_ is 0 at start and above, and where
    a width is not legal; damage is 0 at start. Of equally cheap segments the nearest is taken.
    """
    single, convex = _single_steps(bytes_, damage)
    bent = np.flatnonzero(~convex)
    if not bent.size:
        return _sorted_steps(single)
    found = _walk_hulls(bytes_[:, bent], damage[:, bent], start[bent])
    found = [segments._replace(row=bent[segments.row]) for segments in found]
    return _sorted_steps(_Segments(*map(np.concatenate, zip(single, *found, strict=True))))


def _single_steps(bytes_: np.ndarray, damage: np.ndarray) -> tuple[_Segments, np.ndarray]:
    """Single-width steps of the rows whose hull consists of them, as most do, and bool (R,) which rows those are."""
    widths, rows = bytes_.shape
    run, rise = bytes_[-2::-1] - bytes_[:0:-1], damage[-2::-1] - damage[:0:-1]
    taken = run > 0
    slope = np.divide(rise, run, out=np.full(run.shape, np.inf), where=taken)
    convex = np.count_nonzero(taken, axis=0) == np.count_nonzero(bytes_, axis=0)
    if widths > 2:
        convex &= ~((slope[1:] < slope[:-1]) & taken[:-1]).any(axis=0)
    flat = np.flatnonzero(taken & convex)
    place, row = np.divmod(flat, rows)
    to = (widths - 2 - place).astype(np.int8)
    slope, run, rise = (values.reshape(-1)[flat] for values in (slope, run, rise))
    return _Segments(slope, row, to + np.int8(1), to, run, rise), convex


def _walk_hulls(bytes_: np.ndarray, damage: np.ndarray, start: np.ndarray) -> list[_Segments]:
    """Segments of any rows: from where each row is, again and again the cheapest way on, to whatever width."""
    rows = np.arange(len(start))
    at, at_bytes, at_damage, last = start, np.zeros(len(rows)), np.zeros(len(rows)), np.full(len(rows), -np.inf)
    found = []
    for _ in range(len(bytes_) - 1):
        slope, to = _cheapest_next(bytes_, damage, at_bytes, at_damage)
        going = np.flatnonzero(np.isfinite(slope))
        if not going.size:
            break
        bytes_, damage, rows, came_from, to = bytes_[:, going], damage[:, going], rows[going], at[going], to[going]
        everyone = np.arange(len(going))
        to_bytes, to_damage = bytes_[to, everyone], damage[to, everyone]
        # Rounding may make a later segment look cheaper by one unit in the last place; it still comes later.
        last = np.maximum(slope[going], last[going])
        found.append(_Segments(last, rows, came_from, to, to_bytes - at_bytes[going], to_damage - at_damage[going]))
        at, at_bytes, at_damage = to, to_bytes, to_damage
    return found


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
    order = argsort_by(found.slope, found.row)
    total_bytes, total_damage = np.cumsum(found.bytes[order]), np.cumsum(found.damage[order])
    return Steps(found.row[order], found.origin[order], found.to[order], total_bytes, total_damage)


def argsort_by(keys: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Indices that sort keys; equal keys by row, then by index. Faster than a stable sort where few keys are equal."""
    order = np.argsort(keys)
    ranked = keys[order]
    equal = ranked[1:] == ranked[:-1]
    if equal.any():
        tied = np.append(equal, False) | np.insert(equal, 0, False)
        group = np.cumsum(np.insert(~equal, 0, True))[tied]
        members = order[tied]
        order[tied] = members[np.lexsort((members, row[members], group))]
    return order
