"""The last few moves of a plan: the greedy stops at the first step past its target, which can be a dear one.

Around that break the best combination of moves is found exactly, rows with the least reduced cost first: a move that
costs more than the break's slope explains by more than the gap still open cannot be part of a better plan. One search
answers both questions: the least damage for enough bytes (cover), and the most bytes for little enough damage (pack).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pagedweight.runtime.planner_greedy import Steps
from pagedweight.runtime.planner_scores import places

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


class _Goal(NamedTuple):
    """What a combination is judged by.

    keys: (bytes, damage) of combinations -> what is compared first, infinite where a combination will not do, and
        what decides between equals; the least wins.
    gap: (first key of the best so far, slope) -> how much reduced cost a better combination may have.
    """

    keys: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    gap: Callable[[float, float], float]


def cover(
    steps: Steps, start: np.ndarray, bytes_: np.ndarray, damage: np.ndarray, target_bytes: int, count: int
) -> Change:
    """The cheapest plan that releases target_bytes, from the greedy's first count steps, which do.

    start: (R,) present width index. bytes_, damage: (W, R) totals by width index, infinite where not legal and 0 at
    the present width. Equal damage releases the more bytes, so that a larger target never releases less.
    """
    needed = target_bytes - steps.totals(count)[0]
    goal = _Goal(lambda b, d: (np.where(b >= needed, d, np.inf), -b), lambda least, slope: least - slope * needed)
    return _best_change(steps, start, bytes_, damage, count, count, goal)


def pack(
    steps: Steps, start: np.ndarray, bytes_: np.ndarray, damage: np.ndarray, most_damage: float, count: int
) -> Change:
    """The plan that releases the most for at most most_damage, from the greedy's first count steps, the last that fit.

    Arguments as for cover. Equal bytes cost the less damage.
    """
    if count == len(steps.row):
        return Change(count, (), (), *steps.totals(count))
    left = most_damage - steps.totals(count)[1]
    goal = _Goal(lambda b, d: (np.where(d <= left, -b, np.inf), d), lambda least, slope: left + slope * least)
    return _best_change(steps, start, bytes_, damage, count, count + 1, goal)


def _best_change(
    steps: Steps, start: np.ndarray, bytes_: np.ndarray, damage: np.ndarray, count: int, broken: int, goal: _Goal
) -> Change:
    """The best combination of moves on top of the first count steps; step number `broken` is the one at the break."""
    base = places(steps.reached(start, count))
    plain = Change(count, (), (), *steps.totals(count))
    (before_bytes, before_damage), (at_bytes, at_damage) = steps.totals(broken - 1), steps.totals(broken)
    slope = (at_damage - before_damage) / (at_bytes - before_bytes)
    reduced = damage - slope * bytes_
    reduced -= reduced.reshape(-1).take(base)
    reduced.reshape(-1)[base] = np.inf
    nearest = reduced.min(axis=0)
    core = (nearest <= goal.gap(0.0, slope)).nonzero()[0]
    core = core[nearest[core].argsort(kind="stable")[:_CORE_ROWS]]
    more_bytes, more_damage = (totals[:, core] - totals.reshape(-1)[base[core]] for totals in (bytes_, damage))
    best, trail = _search(more_bytes, more_damage, reduced[:, core], slope, goal)
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
    more_bytes: np.ndarray, more_damage: np.ndarray, reduced: np.ndarray, slope: float, goal: _Goal
) -> tuple[tuple[int, int] | None, list[_Core]]:
    """The best combination as (level, index) into the trail of levels, None where staying put is best."""
    none = np.zeros(1, dtype=np.int64)
    trail = [_Core(none, np.zeros(1), none, none)]
    best, best_key = None, (0.0, 0.0)
    for place in range(reduced.shape[1]):
        gap = goal.gap(best_key[0], slope)
        if reduced[:, place].min() > gap:
            break
        level = _extend(trail[-1], more_bytes[:, place], more_damage[:, place], reduced[:, place], slope, gap)
        trail.append(level)
        first, second = goal.keys(level.bytes, level.damage)
        least = (first == first.min()).nonzero()[0]
        index = int(least[second[least].argmin()])
        key = (float(first[index]), float(second[index]))
        if key < best_key:
            best, best_key = (len(trail) - 1, index), key
    return best, trail


def _extend(
    before: _Core, more_bytes: np.ndarray, more_damage: np.ndarray, reduced: np.ndarray, slope: float, gap: float
) -> _Core:
    """Every combination so far, without and with each useful move of one more row; dominated ones are dropped."""
    moves = (reduced <= gap).nonzero()[0]
    bytes_ = np.concatenate([before.bytes, *(before.bytes + more_bytes[to] for to in moves)])
    damage = np.concatenate([before.damage, *(before.damage + more_damage[to] for to in moves)])
    cost = damage - slope * bytes_
    kept = (cost <= gap).nonzero()[0]
    if len(kept) > _CORE_STATES:
        kept = kept[cost[kept].argsort(kind="stable")[:_CORE_STATES]]
    kept = kept[(-bytes_[kept]).argsort(kind="stable")]
    least = np.minimum.accumulate(damage[kept])
    undominated = np.ones(len(kept), dtype=bool)
    np.less(damage[kept[1:]], least[:-1], out=undominated[1:])
    kept = kept[undominated]
    with_move, parent = np.divmod(kept, len(before.bytes))
    return _Core(bytes_[kept], damage[kept], parent, np.append(-1, moves)[with_move])


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
