"""Key and value slabs made of arena frames.

A slab holds K or V of one layer for a batch of sequences. A frame holds consecutive tokens of one sequence; frames are
taken when a sequence grows into them and found again through a small index, as a page table finds pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.integrations.kv_places import Places
from pagedweight.integrations.kv_pool import FrameHoldings, KVPool
from pagedweight.runtime.frame_ids import replaced
from pagedweight.runtime.interrupts import InterruptsHeld


class Slab:
    """K or V of one layer: tokens [start, stop) of each of B sequences, in frame columns from first_column on."""

    def __init__(self, places: Places, holdings: FrameHoldings) -> None:
        self.places = places
        self.tokens_per_frame = places.tokens_per_frame
        self._holdings = holdings
        holdings.followers.append(self)
        self.start = self.stop = 0
        self._hold(None, None, 0)

    def clear(self) -> None:
        """Forget every token and give every frame back."""
        held = self.frames
        self.start = self.stop = 0
        self._hold(None, None, 0)
        if held is not None:
            self._holdings.give(held.ravel())

    def _hold(self, frames: np.ndarray | None, index: torch.Tensor | None, first_column: int) -> None:
        """What follows from the frames is worked out here: most tokens are written and read with those of the last."""
        self.frames, self._index, self.first_column = frames, index, first_column
        self.index = None if index is None else index.flatten()
        self._last_column: tuple[int, torch.Tensor | None] = -1, None
        self.room = 0 if frames is None else (first_column + frames.shape[1]) * self.tokens_per_frame

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def columns(self) -> int:
        return 0 if self.frames is None else self.frames.shape[1]

    def has_room(self, stop: int) -> bool:
        """Whether tokens up to `stop` can be written behind those held."""
        return self.start < self.stop and stop <= self.room

    def missing_columns(self, start: int, stop: int) -> int:
        """Frame columns to add before tokens [start, stop) can be written; an empty slab may begin at any token."""
        first = self.first_column if self.columns else start // self.tokens_per_frame
        return max(0, -(-stop // self.tokens_per_frame) - first - self.columns)

    def forget_reservation(self, start: int, batch: int) -> None:
        """Give back frames that were taken for a forward that never wrote, unless this one writes there too."""
        if self.frames is not None and not self.tokens and (self.start, self.frames.shape[0]) != (start, batch):
            self.clear()

    def add_columns(self, start: int, frames: np.ndarray, index: torch.Tensor) -> None:
        """Take over frames (B, n) and their ids on the device; start is used while the slab is empty."""
        if self.frames is None:
            self.start = self.stop = start
            self._hold(frames, index, start // self.tokens_per_frame)
        else:
            together = np.concatenate([self.frames, frames], axis=1), torch.cat([self._index, index], dim=1)
            self._hold(*together, self.first_column)

    def follow(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Frames have moved within the arena: those of the sources that are this slab's are at their targets now."""
        if self.frames is None:
            return
        frames = replaced(self.frames, sources, targets)
        if not np.array_equal(frames, self.frames):
            self._hold(frames, on_device(frames, self.places.device), self.first_column)

    def write(self, states: torch.Tensor) -> None:
        """Append states (B, heads, S, head_dim); the columns must be there."""
        if states.shape[2] == 1:
            self._write_one(states)
            return
        position = torch.arange(self.stop, self.stop + states.shape[2], device=self.places.device)
        column = position // self.tokens_per_frame - self.first_column
        self.places.write(self._index[:, column], position % self.tokens_per_frame, states)
        self.stop += states.shape[2]

    def _write_one(self, states: torch.Tensor) -> None:
        column, place = divmod(self.stop, self.tokens_per_frame)
        if column != self._last_column[0]:
            self._last_column = column, self._index[:, column - self.first_column]
        self.places.write_one(self._last_column[1], place, states)
        self.stop += 1

    def read(self, first: int = 0) -> torch.Tensor:
        """(B, heads, tokens, head_dim), every token held whose number is not below `first`, as a copy."""
        return self.part_of(self.places.gather(self.index), 0, first)

    def part_of(self, gathered: torch.Tensor, first_row: int, first: int) -> torch.Tensor:
        """What read() gives, as a view of gathered frames of which those from first_row on are this slab's."""
        start = max(self.start, first)
        skipped = start - self.first_column * self.tokens_per_frame
        return self.places.tokens(gathered, first_row, len(self.frames), self.columns, skipped, self.stop - start)

    def drop_before(self, start: int) -> None:
        """Forget tokens before `start` and give back the frames that only held such tokens."""
        self.start = max(self.start, min(start, self.stop))
        gone = min(self.start // self.tokens_per_frame - self.first_column, self.columns)
        if gone > 0:
            held = self.frames
            self._hold(held[:, gone:], self._index[:, gone:], self.first_column + gone)
            self._holdings.give(held[:, :gone].ravel())

    def drop_from(self, stop: int) -> None:
        """Forget tokens from `stop` on and give back the frames that only held such tokens."""
        if stop <= self.start:
            self.clear()
            return
        self.stop = min(self.stop, stop)
        kept = -(-self.stop // self.tokens_per_frame) - self.first_column
        held = self.frames
        self._hold(held[:, :kept], self._index[:, :kept], self.first_column)
        self._holdings.give(held[:, kept:].ravel())

    def permute(self, sequences: torch.Tensor) -> None:
        """Sequence i becomes the old sequence sequences[i]; as many sequences as before, so no frame is needed."""
        states = self.read().index_select(0, sequences.to(self.places.device))
        self.stop = self.start
        self.write(states)


def on_device(frames: np.ndarray, device: torch.device) -> torch.Tensor:
    """Frame ids on the device; the host does not wait for it."""
    ids = torch.from_numpy(frames)
    return ids if device.type == "cpu" else ids.pin_memory().to(device, non_blocking=True)


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
    if any(counts):
        with InterruptsHeld():
            _add_columns(pool, holdings, spans, counts, batch)


def _add_columns(
    pool: KVPool, holdings: FrameHoldings, spans: Sequence[Span], counts: Sequence[int], batch: int
) -> None:
    frames = pool.take(holdings, sum(counts))
    with ExitStack() as on_error:
        on_error.callback(holdings.give, frames)
        index = on_device(frames, pool.arena.memory.device)
        on_error.pop_all()
    first = 0
    for (slab, start, _), count in zip(spans, counts, strict=True):
        if count:
            part = slice(first, first + count)
            slab.add_columns(start, frames[part].reshape(batch, -1), index[part].view(batch, -1))
            first += count
