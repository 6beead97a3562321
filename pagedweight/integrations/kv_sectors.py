"""Runs of arena frames for engines that know their KV blocks by number: lent one by one, and given back."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from pagedweight.integrations.kv_pool import KVPool
from pagedweight.runtime.interrupts import InterruptsHeld


class KVSectors:
    """Sector s is the arena's bytes from `first_frame` on, s * sector_bytes further: one flat tensor, of which sectors
    that are not held hold expert weights.

    The first `reserved` sectors are held for life, zeroed. sector_bytes: the smallest multiple of unit_bytes in whole
    frames. most: sectors that may be held beside those. ValueError when not one fits.
    """

    def __init__(self, pool: KVPool, unit_bytes: int, reserved: int, most: int | None = None) -> None:
        arena = pool.arena
        self.sector_bytes = math.lcm(unit_bytes, arena.frame_bytes)
        self.reserved = reserved
        self._pool = pool
        self._frames = self.sector_bytes // arena.frame_bytes
        self._holdings = pool.new_holdings()
        self._lent: set[int] = set()
        self.first_frame = int(pool.take_run(self._holdings, reserved * self._frames)[0])
        self.count = (arena.frames - self.first_frame) // self._frames - reserved
        self.most = self.count if most is None else min(most, self.count)
        if self.most < 1:
            self.close()
            raise ValueError(
                f"the budget has no room for {reserved + 1} sectors of {self.sector_bytes} bytes beside the tables; "
                f"raise budget_bytes, or give a frame_bytes that divides {unit_bytes}"
            )
        self.memory[: reserved * self.sector_bytes].zero_()

    @property
    def memory(self) -> torch.Tensor:
        """uint8 (sectors * sector_bytes,), the reserved ones first; a view of the arena."""
        begin = self.first_frame * self._pool.arena.frame_bytes
        with torch.inference_mode(False):
            return self._pool.arena.memory[begin : begin + (self.reserved + self.count) * self.sector_bytes]

    @property
    def held(self) -> int:
        """Sectors lent now, without the reserved ones."""
        return len(self._lent)

    @property
    def obtainable(self) -> int:
        """Sectors that could still be had, if weights gave up all that they can."""
        return min(self.most - self.held, self._pool.obtainable_bytes // self.sector_bytes)

    def take(self) -> int:
        """The number of a sector that is held from now on; weights there move or give their bytes up. Raises
        OutOfFrames."""
        with InterruptsHeld():
            first = int(self._pool.take_window(self._holdings, self._frames, self.first_frame)[0])
            number = (first - self.first_frame) // self._frames
            self._lent.add(number)
            return number

    def give(self, numbers: Iterable[int]) -> None:
        """Nothing that these sectors hold is needed any more."""
        numbers = sorted(numbers)
        if numbers:
            first = self.first_frame + np.array(numbers) * self._frames
            with InterruptsHeld():
                self._holdings.give((first[:, None] + np.arange(self._frames)).ravel())
                self._lent.difference_update(numbers)

    def give_all(self) -> None:
        """All but the reserved ones."""
        self.give(self._lent)

    def close(self) -> None:
        """Give every sector back, the reserved ones too."""
        self._holdings.give_all()
        self._lent.clear()

    def abandoned_with(self, user: object) -> None:
        """close(), at the next collect after the user is gone."""
        weakref.finalize(user, self._pool.abandon, self._holdings).atexit = False
