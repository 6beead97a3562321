"""Key and value slabs made of arena frames.

A slab holds K or V of one layer for a batch of sequences. A frame holds consecutive tokens of one sequence; frames are
taken when a sequence grows into them and found again through a small index, as a page table finds pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.integrations.kv_places import Places
from pagedweight.integrations.kv_pool import FrameHoldings, KVPool
from pagedweight.runtime.frame_ids import replaced
from pagedweight.runtime.interrupts import InterruptsHeld


class FrameIds:
    """Ids of frames, taken to the device when something there first asks for them."""

    def __init__(self, frames: np.ndarray, device: torch.device) -> None:
        self._frames = frames
        self._device = device
        self._there: torch.Tensor | None = None

    def there(self) -> torch.Tensor:
        """The host does not wait for them."""
        if self._there is None:
            ids = torch.from_numpy(self._frames)
            self._there = ids if self._device.type == "cpu" else ids.pin_memory().to(self._device, non_blocking=True)
        return self._there


class Slab:
    """K or V of one layer: tokens [start, stop) of each of B sequences, in frame columns from first_column on.

    Columns are put together when they are used: a cache that grows takes no time on the device before its forward.
    """

    def __init__(self, places: Places, holdings: FrameHoldings) -> None:
        self.places = places
        self.tokens_per_frame = places.tokens_per_frame
        self._holdings = holdings
        holdings.followers.append(self)
        self.forget()

    def clear(self) -> None:
        """Forget every token and give every frame back."""
        held = self.frames
        self.forget()
        if held.size:
            self._holdings.give(held.ravel())

    def forget(self) -> None:
        """Every token, and every frame, which somebody else gives back."""
        self.start = self.stop = self.batch = 0
        self._hold(np.empty((0, 0), dtype=np.int64), None, 0)

    def _hold(self, frames: np.ndarray, table: torch.Tensor | None, first_column: int) -> None:
        """frames: (B, columns), on the device `table`."""
        self.first_column, self.columns = first_column, frames.shape[1]
        self._frames, self._table = [frames], table
        self._coming: list[tuple[FrameIds, slice]] = []
        self._columns_changed()

    def _columns_changed(self) -> None:
        self.room = (self.first_column + self.columns) * self.tokens_per_frame
        self._index: torch.Tensor | None = None
        self._last_column: tuple[int, torch.Tensor | None] = -1, None

    @property
    def frames(self) -> np.ndarray:
        """int64 (B, columns)."""
        if len(self._frames) > 1:
            self._frames = [np.concatenate(self._frames, axis=1)]
        return self._frames[0]

    @property
    def table(self) -> torch.Tensor:
        """The same on the device."""
        if self._coming:
            parts = [ids.there()[part].view(self.batch, -1) for ids, part in self._coming]
            parts = parts if self._table is None else [self._table, *parts]
            self._table, self._coming = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), []
        return self._table

    @property
    def index(self) -> torch.Tensor:
        """And in one dimension, the same object until it changes."""
        if self._index is None:
            self._index = self.table.flatten()
        return self._index

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def has_room(self, stop: int) -> bool:
        """Whether tokens up to `stop` can be written behind those held."""
        return self.start < self.stop and stop <= self.room

    def missing_columns(self, start: int, stop: int) -> int:
        """Frame columns to add before tokens [start, stop) can be written; an empty slab may begin at any token."""
        first = self.first_column if self.columns else start // self.tokens_per_frame
        return max(0, -(-stop // self.tokens_per_frame) - first - self.columns)

    def forget_reservation(self, start: int, batch: int) -> None:
        """Give back frames that were taken for a forward that never wrote, unless this one writes there too."""
        if self.columns and not self.tokens and (self.start, self.batch) != (start, batch):
            self.clear()

    def add_columns(self, start: int, frames: np.ndarray, ids: FrameIds, part: slice) -> None:
        """Take over frames (B, n), which are a part of the ids; start is used while the slab is empty."""
        if not self.columns:
            self.start = self.stop = start
            self.batch, self.first_column, self._frames = len(frames), start // self.tokens_per_frame, []
        self._frames.append(frames)
        self._coming.append((ids, part))
        self.columns += frames.shape[1]
        self._columns_changed()

    def follow(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Frames have moved within the arena: those of the sources that are this slab's are at their targets now."""
        frames = replaced(self.frames, sources, targets)
        if not np.array_equal(frames, self.frames):
            self._hold(frames, None, self.first_column)
            self._coming.append((FrameIds(frames.ravel(), self.places.device), slice(None)))

    def write(self, states: torch.Tensor) -> None:
        """Append states (B, heads, S, head_dim); the columns must be there."""
        if states.shape[2] == 1:
            self._write_one(states)
            return
        position = torch.arange(self.stop, self.stop + states.shape[2], device=self.places.device)
        column = position // self.tokens_per_frame - self.first_column
        self.places.write(self.table[:, column], position % self.tokens_per_frame, states)
        self.stop += states.shape[2]

    def _write_one(self, states: torch.Tensor) -> None:
        column, place = divmod(self.stop, self.tokens_per_frame)
        if column != self._last_column[0]:
            self._last_column = column, self.table[:, column - self.first_column]
        self.places.write_one(self._last_column[1], place, states)
        self.stop += 1

    def read(self, first: int = 0) -> torch.Tensor:
        """(B, heads, tokens, head_dim), every token held whose number is not below `first`, as a copy."""
        return self.part_of(self.places.gather(self.index), 0, first)

    def part_of(self, gathered: torch.Tensor, first_row: int, first: int) -> torch.Tensor:
        """What read() gives, as a view of gathered frames of which those from first_row on are this slab's."""
        start = max(self.start, first)
        skipped = start - self.first_column * self.tokens_per_frame
        return self.places.tokens(gathered, first_row, self.batch, self.columns, skipped, self.stop - start)

    def drop_before(self, start: int) -> None:
        """Forget tokens before `start` and give back the frames that only held such tokens."""
        self.start = max(self.start, min(start, self.stop))
        gone = min(self.start // self.tokens_per_frame - self.first_column, self.columns)
        if gone > 0:
            self._keep(slice(gone, None), slice(gone))

    def drop_from(self, stop: int) -> None:
        """Forget tokens from `stop` on and give back the frames that only held such tokens."""
        if stop <= self.start:
            self.clear()
            return
        self.stop = min(self.stop, stop)
        kept = -(-self.stop // self.tokens_per_frame) - self.first_column
        if kept < self.columns:
            self._keep(slice(kept), slice(kept, None))

    def _keep(self, kept: slice, given: slice) -> None:
        """Of the columns the kept ones; the given ones, which are the others, go back to the arena."""
        held, table = self.frames, self.table[:, kept]
        with InterruptsHeld():
            self._hold(held[:, kept], table, self.first_column + (kept.start or 0))
            self._holdings.give(held[:, given].ravel())

    def permute(self, sequences: torch.Tensor) -> None:
        """Sequence i becomes the old sequence sequences[i]; as many sequences as before, so no frame is needed."""
        states = self.read().index_select(0, sequences.to(self.places.device))
        self.stop = self.start
        self.write(states)


class Span(NamedTuple):
    """Tokens [start, stop) that are about to be written to each sequence of a slab."""

    slab: Slab
    start: int
    stop: int


def missing_frames(spans: Sequence[Span], batch: int) -> int:
    """Frames to add before the spans of `batch` sequences can be written."""
    return batch * sum(span.slab.missing_columns(span.start, span.stop) for span in spans)


def grow(pool: KVPool, holdings: FrameHoldings, spans: Sequence[Span], batch: int) -> None:
    """Make the spans writable, with one allocation: either every slab grows or none does. Raises OutOfFrames."""
    for slab, start, _ in spans:
        slab.forget_reservation(start, batch)
    counts = [batch * slab.missing_columns(start, stop) for slab, start, stop in spans]
    if not any(counts):
        return
    with InterruptsHeld():
        frames = pool.take(holdings, sum(counts))
        ids, first = FrameIds(frames, pool.arena.memory.device), 0
        for (slab, start, _), count in zip(spans, counts, strict=True):
            if count:
                part = slice(first, first + count)
                slab.add_columns(start, frames[part].reshape(batch, -1), ids, part)
                first += count
