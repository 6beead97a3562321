"""Allocations that fail ask the weights for bytes, a bounded number of times, and then say what is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from pagedweight.runtime.frames import Arena, OutOfFrames

_ATTEMPTS = 3

Allocated = TypeVar("Allocated")
SHORTAGES = (OutOfFrames, torch.OutOfMemoryError)


class Rescue:
    """release: makes so many bytes free in the arena if it can; returns the bytes free then. may_release: whether it
    does anything now.
    """

    def __init__(self, arena: Arena, release: Callable[[int], int], may_release: Callable[[], bool]) -> None:
        self._arena = arena
        self._release = release
        self._may_release = may_release

    def ensure(self, wanted_bytes: int) -> None:
        """Make bytes free now. Raises OutOfFrames when that cannot be."""
        before = self._arena.free_bytes
        if self._release(wanted_bytes) < wanted_bytes:
            raise self._shortage(wanted_bytes, before)

    def allocating(self, allocate: Callable[[], Allocated], wanted_bytes: int) -> Allocated:
        """What allocate() returns. When it is short of memory, bytes are asked of the weights and it is tried again.

        Each attempt asks for more than the last: an allocator may need bytes that lie together, or of one kind.
        """
        before = self._arena.free_bytes
        for attempt in range(_ATTEMPTS):
            try:
                return allocate()
            except SHORTAGES:
                free = self._release(wanted_bytes << attempt)
                if free < wanted_bytes:
                    raise self._shortage(wanted_bytes, before) from None
        try:
            return allocate()
        except SHORTAGES as error:
            raise OutOfFrames(
                f"{wanted_bytes} bytes wanted: {self._arena.free_bytes} are free in the arena, {before} were before, "
                f"and the allocation fails after {_ATTEMPTS} attempts all the same; memory outside the arena has to "
                "come from a smaller budget_bytes"
            ) from error

    def _shortage(self, wanted_bytes: int, before_bytes: int) -> OutOfFrames:
        free = self._arena.free_bytes
        if not self._may_release():
            return OutOfFrames(
                f"{wanted_bytes} bytes wanted and {free} are free; nothing is released while widths are held or after "
                "close: free some KV cache or hold fewer bits"
            )
        return OutOfFrames(
            f"{wanted_bytes} bytes wanted: {before_bytes} were free, {free - before_bytes} more were released, "
            f"{wanted_bytes - free} are missing with every linear-block as low as the floor, pins and quality budget "
            "leave it; free some KV cache or raise the budget"
        )
