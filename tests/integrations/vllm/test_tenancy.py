"""Frames in KV blocks: nothing is lost, doubled or forgotten, whatever rises, falls and moves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.integrations.vllm.tenancy import Tenancy

PLANES, RESIDENT = 5, 2


class Blocks:
    """A pool of block ids and the bytes in them, played as a device would: one number in every place."""

    def __init__(self, tenancy: Tenancy, count: int) -> None:
        self.tenancy = tenancy
        self.free = list(range(1, count + 1))
        self.memory = np.full((count + 1, tenancy.frames_per_block), -1)
        self.where: dict[tuple[int, int, int], tuple[int, int]] = {}

    def raise_rows(self, rows: np.ndarray, bits: np.ndarray) -> None:
        needed = self.tenancy.frames_needed(rows, bits) - self.tenancy.empty_frames
        blocks = max(0, -(-needed // self.tenancy.frames_per_block))
        if blocks > len(self.free):
            return
        self.tenancy.add_blocks(np.array([self.free.pop() for _ in range(blocks)], dtype=np.int64))
        spots = self.tenancy.place(rows, bits)
        for row, plane, frame, block, position in zip(*spots, strict=True):
            self.memory[block, position] = name(row, plane, frame)
            self.where[row, plane, frame] = block, position

    def vacate(self, most: int) -> int:
        block_ids, moves = self.tenancy.vacate(most)
        moved = self.memory[moves.block, moves.position]
        for value, block, position, *page in zip(
            moved, moves.frames.block, moves.frames.position, *moves.frames[:3], strict=True
        ):
            self.memory[block, position] = value
            self.where[tuple(page)] = block, position
        self.memory[block_ids] = -7  # another owner writes there at once
        self.free += block_ids.tolist()
        return len(block_ids)

    def check(self) -> None:
        self.tenancy.check()
        for row, coming in enumerate(self.tenancy.coming):
            for plane in range(RESIDENT, coming):
                for frame in range(self.tenancy.plane_frames[row]):
                    assert self.memory[self.where[row, plane, frame]] == name(row, plane, frame)


def name(row: int, plane: int, frame: int) -> int:
    return (row * 100 + plane) * 100 + frame


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[str, int, int]]]:
    frames = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    steps = st.tuples(st.sampled_from(["raise", "land", "lower", "vacate"]), st.integers(0, 5), st.integers(0, PLANES))
    return frames, draw(st.integers(1, 7)), draw(st.lists(steps, max_size=30))


@given(walks())
def test_a_walk_keeps_every_frame(walk: tuple[list[int], int, list[tuple[str, int, int]]]) -> None:
    frames, per_block, steps = walk
    tenancy = Tenancy(np.array(frames), PLANES, RESIDENT, per_block)
    blocks = Blocks(tenancy, 12)
    for verb, at, amount in steps:
        row = np.array([at % len(frames)])
        bits = np.clip(np.array([amount]), RESIDENT, PLANES)
        at_rest = tenancy.coming[row] == tenancy.width[row]
        if verb == "raise" and at_rest and bits > tenancy.width[row]:
            blocks.raise_rows(row, bits)
        elif verb == "land":
            tenancy.raised(tenancy.loading)
        elif verb == "lower" and bits < tenancy.coming[row]:
            before = tenancy.width[row].copy()
            tenancy.lower(row, bits)
            assert tenancy.width[row] == min(before, bits)
        elif verb == "vacate":
            possible = tenancy.empty_frames // per_block
            given_up = blocks.vacate(amount)
            if not len(tenancy.loading):
                assert given_up == min(possible, amount), "empty places for a block, and none was given up"
        blocks.check()


def test_what_falls_together_is_given_up_without_a_move() -> None:
    """Frames placed in the order in which they will fall: the block to give up is empty already."""
    tenancy = Tenancy(np.full(8, 2), PLANES, RESIDENT, 4)
    tenancy.add_blocks(np.arange(1, 13))
    for bits in (3, 4, 5):
        for first in (0, 2, 4, 6):
            tenancy.place(np.array([first, first + 1]), np.array([bits, bits]))
            tenancy.raised(np.array([first, first + 1]))
    tenancy.lower(np.array([0, 1]), np.array([4, 4]))
    block_ids, moves = tenancy.vacate(3)
    assert len(block_ids) == 1
    assert not moves.frames
    tenancy.lower(np.array([2, 4]), np.array([4, 4]))  # of two blocks: half a block moves
    block_ids, moves = tenancy.vacate(3)
    assert len(block_ids) == 1
    assert len(moves.block) == 2
