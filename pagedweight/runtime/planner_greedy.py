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
    slope: (S,), damage per byte. bytes, damage: (S,), totals of this step and all before it.
    """

    row: np.ndarray
    origin: np.ndarray
    to: np.ndarray
    slope: np.ndarray
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


def hull_steps(bytes_: np.ndarray, damage: np.ndarray, start: np.ndarray, nearest_first: np.ndarray) -> Steps:
    """Sorted hull segments of every row.

    bytes_, damage: (W, R), each width's totals measured from the row's present state; infinite damage marks what is
    not legal. start: (R,) present width index. nearest_first: (W,) width indices in the order in which a row passes
    them; of equally cheap segments the nearest is taken.
    """
    rows = np.arange(len(start))
    at, at_bytes, at_damage = start, np.zeros(len(rows)), np.zeros(len(rows))
    last = np.full(len(rows), -np.inf)
    segments = []
    for _ in nearest_first:
        slope, to = _cheapest_next(bytes_, damage, rows, at_bytes, at_damage, nearest_first)
        going = np.flatnonzero(np.isfinite(slope))
        if not going.size:
            break
        rows, to, came_from = rows[going], to[going], at[going]
        to_bytes, to_damage = bytes_[to, rows].astype(np.float64), damage[to, rows]
        # Rounding may make a later segment look cheaper by one unit in the last place; it still comes later.
        last = np.maximum(slope[going], last[going])
        segments.append((last, rows, came_from, to, to_bytes - at_bytes[going], to_damage - at_damage[going]))
        at, at_bytes, at_damage = to, to_bytes, to_damage
    return _sorted_steps(segments)


def _cheapest_next(
    bytes_: np.ndarray,
    damage: np.ndarray,
    rows: np.ndarray,
    at_bytes: np.ndarray,
    at_damage: np.ndarray,
    nearest_first: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Least slope from where each row is to any width beyond, and that width's index; infinite at the end."""
    best, to = np.full(len(rows), np.inf), np.zeros(len(rows), dtype=np.int64)
    everyone = len(rows) == bytes_.shape[1]
    for width in nearest_first:
        run = (bytes_[width] if everyone else bytes_[width, rows]) - at_bytes
        rise = (damage[width] if everyone else damage[width, rows]) - at_damage
        slope = np.divide(rise, run, out=np.full(len(rows), np.inf), where=run > 0)
        cheaper = slope < best
        np.copyto(best, slope, where=cheaper)
        np.copyto(to, width, where=cheaper)
    return best, to


def _sorted_steps(segments: list[tuple[np.ndarray, ...]]) -> Steps:
    if not segments:
        none = np.empty(0, dtype=np.int64)
        return Steps(none, none, none, np.empty(0), none, np.empty(0))
    slope, row, origin, to, gained, added = (np.concatenate(column) for column in zip(*segments, strict=True))
    order = argsort_by(slope, row)
    total_bytes = np.cumsum(gained[order]).astype(np.int64)
    return Steps(row[order], origin[order], to[order], slope[order], total_bytes, np.cumsum(added[order]))


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
