"""Which frames of which pages lie where in the KV blocks that the weights hold. Values only: no device, no engine."""

from __future__ import annotations

import numpy as np

from pagedweight.integrations.vllm.commands import FrameMoves, FrameSpots

_EMPTY = -1


class Tenancy:
    """Pages above the resident width as tenants of whole KV blocks, `frames_per_block` to a block.

    held_blocks: how many there are. width: int64 (R,), committed widths: planes up to it are in use. coming: int64
    (R,), widths that frames have been placed for; above width while a row loads. Both start at the resident width.
    """

    def __init__(self, plane_frames: np.ndarray, planes: int, resident_width: int, frames_per_block: int) -> None:
        rows, most = len(plane_frames), int(plane_frames.max())
        self.plane_frames = plane_frames
        self.frames_per_block = frames_per_block
        self.resident_width = resident_width
        self.width = np.full(rows, resident_width, dtype=np.int64)
        self.coming = self.width.copy()
        self._shape = (rows, planes - resident_width, most)
        # Of every frame: the slot of its block among those held, and its place there.
        self._slot = np.full(self._shape, _EMPTY, dtype=np.int64)
        self._place = np.full(self._shape, _EMPTY, dtype=np.int64)
        # Of every held block: its id (-1 for a slot without one), and which frame lies at each place.
        self._block_id = np.empty(0, dtype=np.int64)
        self._content = np.empty((0, frames_per_block), dtype=np.int64)
        # Counted along: asked for at every step, and a pool has tens of thousands of blocks.
        self.held_blocks = 0
        self._frames = 0
        self._all_frames = int(plane_frames.sum()) * (planes - resident_width)

    @property
    def blocks(self) -> np.ndarray:
        """Ids of the blocks held."""
        return self._block_id[self._block_id >= 0]

    @property
    def empty_frames(self) -> int:
        """Places in held blocks where no frame lies."""
        return self.held_blocks * self.frames_per_block - self._frames

    @property
    def whole(self) -> bool:
        """Whether every row's frames are placed up to the last plane."""
        return self._frames == self._all_frames

    @property
    def blocks_of_largest_page(self) -> int:
        return -(-int(self.plane_frames.max()) // self.frames_per_block)

    @property
    def loading(self) -> np.ndarray:
        """Rows whose frames are still coming."""
        return np.flatnonzero(self.coming > self.width)

    def add_blocks(self, block_ids: np.ndarray) -> None:
        """Blocks are held from now on, all of their places empty."""
        free = np.flatnonzero(self._block_id < 0)
        missing = len(block_ids) - len(free)
        if missing > 0:
            self._block_id = np.append(self._block_id, np.full(missing, _EMPTY))
            content = np.full((missing, self.frames_per_block), _EMPTY, dtype=np.int64)
            self._content = np.concatenate([self._content, content])
            free = np.flatnonzero(self._block_id < 0)
        self._block_id[free[: len(block_ids)]] = block_ids
        self.held_blocks += len(block_ids)

    def place(self, rows: np.ndarray, bits: np.ndarray, order: np.ndarray | None = None) -> FrameSpots:
        """Spots for all pages that rows need to rise to `bits`, in the fullest blocks that have any; they are taken.

        Rows are at rest, and there are enough empty places. order: (R, P - resident width), where a page stands in the
        order in which pages are expected to be given up: neighbours share blocks.
        """
        row, unit, frame = self._pages(rows, self.width[rows], bits)
        if order is not None:
            by_turn = np.argsort(order[row, unit], kind="stable")
            row, unit, frame = row[by_turn], unit[by_turn], frame[by_turn]
        slots, places = self._empty_places(len(row))
        self._content[slots, places] = np.ravel_multi_index((row, unit, frame), self._shape)
        self._slot[row, unit, frame], self._place[row, unit, frame] = slots, places
        self.coming[rows] = bits
        self._frames += len(row)
        return FrameSpots(row, unit + self.resident_width, frame, self._block_id[slots], places)

    def frames_needed(self, rows: np.ndarray, bits: np.ndarray) -> int:
        """Frames that rows at rest take to rise to `bits`."""
        return int(((bits - self.width[rows]) * self.plane_frames[rows]).sum())

    def raised(self, rows: np.ndarray) -> None:
        """What was coming is in use."""
        self.width[rows] = self.coming[rows]

    def lower(self, rows: np.ndarray, bits: np.ndarray) -> None:
        """Rows fall to `bits`, or, while loading, give up what was coming; places of their pages above are empty."""
        row, unit, frame = self._pages(rows, bits, self.coming[rows])
        self._content[self._slot[row, unit, frame], self._place[row, unit, frame]] = _EMPTY
        self._slot[row, unit, frame] = self._place[row, unit, frame] = _EMPTY
        self._frames -= len(row)
        self.width[rows] = np.minimum(self.width[rows], bits)
        self.coming[rows] = self.width[rows]

    def vacate(self, most_blocks: int) -> tuple[np.ndarray, FrameMoves]:
        """Up to most_blocks blocks, no longer held, and the moves that empty them: their frames go to other blocks.

        As many as empty places allow, the emptiest first; a block with a frame that is still loading stays.
        """
        held = np.flatnonzero(self._block_id >= 0)
        occupied = (self._content[held] != _EMPTY).sum(1)
        fixed = self._still_loading()[held]
        order = np.argsort(np.where(fixed, self.frames_per_block + 1, occupied), kind="stable")
        most = min(most_blocks, self.empty_frames // self.frames_per_block, int((~fixed).sum()))
        # Empty places of loading blocks take frames too, so that count is enough for all of the blocks given up.
        leaving = held[order[:most]]
        places = self._content[leaving]
        at, source_place = np.nonzero(places != _EMPTY)
        source_slot, moved = leaving[at], places[at, source_place]
        source_block = self._block_id[source_slot]
        block_ids = self._block_id[leaving]
        self._block_id[leaving] = _EMPTY
        self._content[leaving] = _EMPTY
        self.held_blocks -= most
        slots, new_places = self._empty_places(len(moved))
        self._content[slots, new_places] = moved
        row, unit, frame = np.unravel_index(moved, self._shape)
        self._slot[row, unit, frame], self._place[row, unit, frame] = slots, new_places
        spots = FrameSpots(row, unit + self.resident_width, frame, self._block_id[slots], new_places)
        return block_ids, FrameMoves(spots, source_block, source_place)

    def check(self) -> None:
        """Assert that frames and places name each other, once each, and that every page needed has its frames."""
        rows = np.arange(len(self.width))
        row, unit, frame = self._pages(rows, np.full(len(rows), self.resident_width), self.coming)
        assert (self.coming >= self.width).all()
        assert self.whole == (self.coming == self.resident_width + self._shape[1]).all()
        assert (self._slot >= 0).sum() == len(row), "a page that is not needed holds a frame"
        slots, places = self._slot[row, unit, frame], self._place[row, unit, frame]
        assert (self._block_id[slots] >= 0).all()
        names = np.ravel_multi_index((row, unit, frame), self._shape)
        assert (self._content[slots, places] == names).all()
        assert (self._content != _EMPTY).sum() == len(row) == self._frames
        assert len(self.blocks) == self.held_blocks
        assert len(np.unique(self.blocks)) == len(self.blocks)

    def _still_loading(self) -> np.ndarray:
        """bool (slots,), whether a block holds a frame that is on its way."""
        rows = self.loading
        row, unit, frame = self._pages(rows, self.width[rows], self.coming[rows])
        found = np.zeros(len(self._block_id), dtype=bool)
        found[self._slot[row, unit, frame]] = True
        return found

    def _empty_places(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Slot and place of empty places in held blocks, those of the fullest blocks first."""
        held = np.flatnonzero(self._block_id >= 0)
        empty = self._content[held] == _EMPTY
        order = np.argsort(empty.sum(1), kind="stable")
        at, place = np.nonzero(empty[order])
        assert len(at) >= count, (len(at), count)
        return held[order][at[:count]], place[:count]

    def _pages(
        self, rows: np.ndarray, low_bits: np.ndarray, high_bits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, unit (plane less the resident ones) and frame of every frame of the planes low+1..high of rows."""
        _, units, most = self._shape
        unit = np.arange(units) + self.resident_width
        wanted = (unit >= low_bits[:, None]) & (unit < high_bits[:, None])
        frames = np.arange(most) < self.plane_frames[rows, None]
        at, of_unit, frame = np.nonzero(wanted[:, :, None] & frames[:, None, :])
        return rows[at], of_unit, frame
