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
    """At most one hull segment of each row."""

    slope: np.ndarray
    row: np.ndarray
    origin: np.ndarray
    to: np.ndarray
    bytes: np.ndarray
    damage: np.ndarray


def hull_steps(bytes_: np.ndarray, damage: np.ndarray, start: np.ndarray, nearest_first: np.ndarray) -> Steps:
    """Sorted hull segments of every row.

    bytes_, damage: float64 (W, R), each width's totals measured from the row's present state; 0 bytes where a width
    is not legal. start: (R,) present width index. nearest_first: (W,) width indices in the order in which a row
    passes them; of equally cheap segments the nearest is taken.
    """
    rows = np.arange(len(start))
    at, at_bytes, at_damage, last = start, np.zeros(len(rows)), np.zeros(len(rows)), np.full(len(rows), -np.inf)
    found = []
    for _ in nearest_first[1:]:
        slope, to, to_bytes, to_damage = _cheapest_next(bytes_, damage, at_bytes, at_damage, nearest_first)
        going = np.flatnonzero(to_bytes)
        if not going.size:
            break
        if len(going) < len(rows):
            rows, at, at_bytes, at_damage, last, slope, to, to_bytes, to_damage = (
                column[going] for column in (rows, at, at_bytes, at_damage, last, slope, to, to_bytes, to_damage)
            )
            bytes_, damage = bytes_[:, going], damage[:, going]
        # Rounding may make a later segment look cheaper by one unit in the last place; it still comes later.
        last = np.maximum(slope, last)
        found.append(_Segments(last, rows, at, to, to_bytes - at_bytes, to_damage - at_damage))
        at, at_bytes, at_damage = to, to_bytes, to_damage
    return _sorted_steps(found)


def _cheapest_next(
    bytes_: np.ndarray, damage: np.ndarray, at_bytes: np.ndarray, at_damage: np.ndarray, nearest_first: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Least slope from where each row is to any width beyond it; that width's index, bytes (0 for none) and damage."""
    rows = len(at_bytes)
    best, to = np.full(rows, np.inf), np.zeros(rows, dtype=np.int8)
    to_bytes, to_damage = np.zeros(rows), np.zeros(rows)
    slope = np.empty(rows)
    for width in nearest_first:
        run = bytes_[width] - at_bytes
        slope.fill(np.inf)
        np.divide(damage[width] - at_damage, run, out=slope, where=run > 0)
        cheaper = slope < best
        for kept, offered in ((best, slope), (to, width), (to_bytes, bytes_[width]), (to_damage, damage[width])):
            np.copyto(kept, offered, where=cheaper)
    return best, to, to_bytes, to_damage


def _sorted_steps(found: list[_Segments]) -> Steps:
    if not found:
        none = np.empty(0, dtype=np.int64)
        return Steps(none, none, none, np.empty(0), np.empty(0))
    slope, row, origin, to, gained, added = (np.concatenate(column) for column in zip(*found, strict=True))
    order = argsort_by(slope, row)
    return Steps(row[order], origin[order], to[order], np.cumsum(gained[order]), np.cumsum(added[order]))


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
