"""The last few moves of a plan: the greedy stops at the first step past its target, which can be a dear one.

Around that break the best combination of moves is found exactly, rows with the least reduced cost first: a move that
costs more than the break's slope explains by more than the gap still open cannot be part of a better plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedweight.runtime.planner_greedy import Steps

_CORE_ROWS = 48
_CORE_STATES = 2048


class Change(NamedTuple):
    """The first `count` steps, then `rows` moved to width indices `to`; bytes and damage of it all."""

    count: int
    rows: tuple[int, ...]
    to: tuple[int, ...]
    bytes: int
    damage: float


class _Core(NamedTuple):
    """Combinations of moves: extra bytes and damage, and how each came from one of the combinations before it."""

    bytes: np.ndarray
    damage: np.ndarray
    parent: np.ndarray
    to: np.ndarray


def cover(
    steps: Steps, start: np.ndarray, bytes_: np.ndarray, damage: np.ndarray, target_bytes: int, count: int
) -> Change:
    """The cheapest plan that releases target_bytes, from the greedy's first count steps, which do.

    start: (R,) present width index. bytes_, damage: (W, R) totals by width index, infinite where not legal and 0 at
    the present width. Equal damage releases the more bytes, so that a larger target never releases less.
    """
    base = steps.reached(start, count)
    plain = Change(count, (), (), *steps.totals(count))
    rows = np.arange(len(start))
    (before_bytes, before_damage), (_, at_damage) = steps.totals(count - 1), steps.totals(count)
    slope = (at_damage - before_damage) / (plain.bytes - before_bytes)
    more_bytes, more_damage = bytes_ - bytes_[base, rows], damage - damage[base, rows]
    reduced = more_damage - slope * more_bytes
    reduced[base, rows] = np.inf
    nearest = reduced.min(axis=0)
    core = np.argpartition(nearest, _CORE_ROWS)[:_CORE_ROWS] if len(rows) > _CORE_ROWS else rows
    core = core[np.lexsort((core, nearest[core]))]
    needed = target_bytes - plain.bytes
    best, trail = _search(more_bytes[:, core], more_damage[:, core], reduced[:, core], slope, needed)
    if best is None:
        return plain
    moves = _unwind(trail, best)
    level, index = best
    found = trail[level]
    return Change(
        count,
        tuple(int(core[place]) for place, _ in moves),
        tuple(to for _, to in moves),
        plain.bytes + int(found.bytes[index]),
        plain.damage + float(found.damage[index]),
    )


def _search(
    more_bytes: np.ndarray, more_damage: np.ndarray, reduced: np.ndarray, slope: float, needed: int
) -> tuple[tuple[int, int] | None, list[_Core]]:
    """The best combination as (level, index) into the trail of levels, None where staying put is best."""
    none = np.zeros(1, dtype=np.int64)
    trail = [_Core(none, np.zeros(1), none, none)]
    best, best_damage, best_bytes = None, 0.0, 0
    for place in range(reduced.shape[1]):
        gap = best_damage - slope * needed
        if reduced[:, place].min() > gap:
            break
        level = _extend(trail[-1], more_bytes[:, place], more_damage[:, place], reduced[:, place], slope, gap)
        trail.append(level)
        meeting = np.flatnonzero(level.bytes >= needed)
        if meeting.size:
            index = meeting[np.lexsort((-level.bytes[meeting], level.damage[meeting]))[0]]
            key = (float(level.damage[index]), -int(level.bytes[index]))
            if key < (best_damage, -best_bytes):
                best, best_damage, best_bytes = (len(trail) - 1, int(index)), key[0], -key[1]
    return best, trail


def _extend(
    before: _Core, more_bytes: np.ndarray, more_damage: np.ndarray, reduced: np.ndarray, slope: float, gap: float
) -> _Core:
    """Every combination so far, without and with each useful move of one more row; dominated ones are dropped."""
    moves = np.flatnonzero(reduced <= gap)
    bytes_ = np.concatenate([before.bytes, (before.bytes + more_bytes[moves, None]).reshape(-1)])
    damage = np.concatenate([before.damage, (before.damage + more_damage[moves, None]).reshape(-1)])
    states = len(before.bytes)
    parent = np.tile(np.arange(states), len(moves) + 1)
    to = np.repeat(np.append(-1, moves), states)
    cost = damage - slope * bytes_
    kept = np.flatnonzero(cost <= gap)
    if len(kept) > _CORE_STATES:
        kept = kept[np.argsort(cost[kept], kind="stable")[:_CORE_STATES]]
    kept = kept[np.lexsort((damage[kept], -bytes_[kept]))]
    least_before = np.minimum.accumulate(np.append(np.inf, damage[kept][:-1]))
    kept = kept[damage[kept] < least_before]
    return _Core(bytes_[kept], damage[kept], parent[kept], to[kept])


def _unwind(trail: list[_Core], best: tuple[int, int]) -> list[tuple[int, int]]:
    """(place in the core, width index) of the moves behind one combination."""
    moves = []
    level, index = best
    while level > 0:
        core = trail[level]
        if core.to[index] >= 0:
            moves.append((level - 1, int(core.to[index])))
        index = int(core.parent[index])
        level -= 1
    return moves
