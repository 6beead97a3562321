"""The page table as values: what the planner reads and what it asks for. Nothing here can be changed by a reader."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TableSnapshot(NamedTuple):
    """The page table at one boundary.

    widths: the supported bitwidths B_i, ascending; widths[0] is the floor.
    committed: int64 (R,), q_i, what kernels use.
    desired: int64 (R,), d_i; differs from committed only while the row is busy.
    bytes: int64 (R, W), M_i^b for b = widths[w]: planes, the width's table and the floor table, in whole frames.
    busy: bool (R,), some page or table of the row is in transfer; such a row takes no transition.
    since: int64 (R,), boundaries since the committed width last changed.
    layer: int64 (R,), the MoE layer's index 0..L-1 (not the model's own number).
    expert, projection: int64 (R,).
    """

    widths: tuple[int, ...]
    committed: np.ndarray
    desired: np.ndarray
    bytes: np.ndarray
    busy: np.ndarray
    since: np.ndarray
    layer: np.ndarray
    expert: np.ndarray
    projection: np.ndarray


class Transition(NamedTuple):
    """One row's move from one committed width to another.

    bytes: |M_i^from - M_i^to| (Eq. 3), positive both ways: released by a lowering, needed by a raise.
    """

    row: int
    from_bits: int
    to_bits: int
    bytes: int

    @property
    def lowers(self) -> bool:
        return self.to_bits < self.from_bits
