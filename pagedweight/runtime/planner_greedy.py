"""GreedySelect of Algorithm 1: the cheapest steps by predicted damage per byte until a byte target is met.

Single-bit steps of a row need not get dearer with depth, so a step is a segment of the row's lower convex hull in
(bytes, damage): taking segments in order of slope is then optimal up to the last one, which `refine` chooses well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Prefixes that `refine` looks at on either side of the greedy's; at real shapes the byte bound stops it at about ten.
_REFINED_PREFIXES = 64


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


class Change(NamedTuple):
    """The first `count` steps and then one row moved to another width index (row -1: none), with the totals."""

    count: int
    row: int
    to: int
    bytes: int
    damage: float


def hull_steps(bytes_: np.ndarray, damage: np.ndarray, start: np.ndarray, nearest_first: np.ndarray) -> Steps:
    """Sorted hull segments of every row.

    bytes_, damage: (W, R), each width's totals measured from the row's present state; infinite damage marks what is
    not legal. start: (R,) present width index. nearest_first: (W,) width indices in the order in which a row passes
    them; of equally cheap segments the nearest is taken.
    """
    points, rows = bytes_.shape
    bytes_, damage = bytes_[nearest_first].astype(np.float64), damage[nearest_first]
    everyone = np.arange(rows)
    at_bytes, at_damage, last, at = np.zeros(rows), np.zeros(rows), np.full(rows, -np.inf), start.astype(np.int64)
    segments = []
    for _ in range(points):
        run = bytes_ - at_bytes
        slope = np.full((points, rows), np.inf)
        np.divide(damage - at_damage, run, out=slope, where=run > 0)
        choice = slope.argmin(axis=0)
        best = slope[choice, everyone]
        going = np.isfinite(best)
        if not going.any():
            break
        # Rounding may make a later segment look cheaper by one unit in the last place; it still comes later.
        last = np.where(going, np.maximum(best, last), np.inf)
        to_bytes = np.where(going, bytes_[choice, everyone], at_bytes)
        to_damage = np.where(going, damage[choice, everyone], at_damage)
        to = np.where(going, nearest_first[choice], at)
        segments.append((last, everyone, at, to, to_bytes - at_bytes, to_damage - at_damage))
        at_bytes, at_damage, at = to_bytes, to_damage, to
    return _sorted_steps(segments)


def _sorted_steps(segments: list[tuple[np.ndarray, ...]]) -> Steps:
    if not segments:
        none = np.empty(0, dtype=np.int64)
        return Steps(none, none, none, np.empty(0), none, np.empty(0))
    # Row-major, so that equal slopes are taken by row and, within a row, in hull order.
    slope, row, origin, to, gained, added = (
        np.stack(column, axis=1).reshape(-1) for column in zip(*segments, strict=True)
    )
    order = stable_order(slope)[: np.count_nonzero(np.isfinite(slope))]
    total_bytes = np.cumsum(gained[order].astype(np.int64))
    return Steps(row[order], origin[order], to[order], slope[order], total_bytes, np.cumsum(added[order]))


def stable_order(keys: np.ndarray) -> np.ndarray:
    """Indices that sort keys, equal keys by index; faster than a stable sort where few keys are equal."""
    order = np.argsort(keys)
    ranked = keys[order]
    equal = ranked[1:] == ranked[:-1]
    if equal.any():
        tied = np.append(equal, False) | np.insert(equal, 0, False)
        group = np.cumsum(np.insert(~equal, 0, True))
        members = order[tied]
        order[tied] = members[np.lexsort((members, group[tied]))]
    return order


def refine(
    steps: Steps, start: np.ndarray, bytes_: np.ndarray, damage: np.ndarray, target_bytes: int, count: int
) -> Change:
    """The cheapest way to release target_bytes by a prefix of the steps and at most one other move of one row.

    start: (R,) present width index. bytes_, damage: (W, R) by width index. count: the greedy's own prefix, which
    meets the target. As the least over one family of plans for every target, a larger target never releases less.
    """
    best = Change(count, -1, -1, *steps.totals(count))
    rows = np.arange(len(start))
    for direction in (-1, 1):
        state = steps.reached(start, count)
        more_bytes, more_damage = bytes_ - bytes_[state, rows], damage - damage[state, rows]
        prefix = count
        for _ in range(_REFINED_PREFIXES):
            released, spent = steps.totals(prefix)
            found = _cheapest(more_bytes, more_damage, target_bytes - released)
            if found is None:
                break
            to, row = found
            change = Change(prefix, row, to, released + int(more_bytes[to, row]), spent + float(more_damage[to, row]))
            if (change.damage, change.bytes) < (best.damage, best.bytes):
                best = change
            step = min(prefix, prefix + direction)
            # Once any row could be put back whole, one step more never pays.
            if not 0 <= step < len(steps.row) or released - target_bytes > -more_bytes.min():
                break
            prefix += direction
            row, index = int(steps.row[step]), int(steps.origin[step] if direction < 0 else steps.to[step])
            more_bytes[:, row] = bytes_[:, row] - bytes_[index, row]
            more_damage[:, row] = damage[:, row] - damage[index, row]
    return best


def _cheapest(more_bytes: np.ndarray, more_damage: np.ndarray, needed_bytes: int) -> tuple[int, int] | None:
    """(width index, row) of the least damage that releases needed_bytes more; of equals the least bytes."""
    priced = np.where(more_bytes >= needed_bytes, more_damage, np.inf)
    least = priced.min()
    if not np.isfinite(least):
        return None
    equal = np.flatnonzero(priced == least)
    choice = equal[more_bytes.reshape(-1)[equal].argmin()]
    return divmod(int(choice), more_bytes.shape[1])
