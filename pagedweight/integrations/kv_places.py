"""The arena's frames as places for tokens of one shape."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedweight.runtime.frames import Arena


class SlabShape(NamedTuple):
    """What one token of K or of V is in one layer: (heads, head_dim) of dtype."""

    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * self.head_dim * self.dtype.itemsize

    def tokens_per_frame(self, frame_bytes: int) -> int:
        """Tokens that fit a frame; ValueError when not even one does."""
        tokens = frame_bytes // self.token_bytes
        if tokens < 1:
            raise ValueError(
                f"one token of K or V is {self.token_bytes} bytes and an arena frame only {frame_bytes}; "
                f"give RuntimeConfig a frame_bytes of at least {self.token_bytes}"
            )
        return tokens


class Places:
    """Every frame of the arena as (tokens_per_frame, heads, head_dim); its rest, which holds no whole token, is left
    out. Serves all slabs of the shape: what a decoding step asks of them again and again is made once.
    """

    def __init__(self, arena: Arena, shape: SlabShape) -> None:
        self.device = arena.memory.device
        self.tokens_per_frame = shape.tokens_per_frame(arena.frame_bytes)
        self._heads, self._head_dim, _ = shape
        self._token = shape.heads * shape.head_dim
        # An ordinary tensor even when made inside inference mode, so that forwards outside can write to it.
        with torch.inference_mode(False):
            self._all = arena.memory.view(shape.dtype).as_strided(
                (arena.frames, self.tokens_per_frame, shape.heads, shape.head_dim),
                (arena.frame_bytes // shape.dtype.itemsize, self._token, shape.head_dim, 1),
            )
        self._of_one: dict[int, torch.Tensor] = {}

    def write(self, frames: torch.Tensor, places: torch.Tensor, states: torch.Tensor) -> None:
        """States (B, heads, S, head_dim) to places (S,) of frames (B, S)."""
        self._all[frames, places] = states.detach().transpose(1, 2)

    def write_one(self, frames: torch.Tensor, place: int, states: torch.Tensor) -> None:
        """States (B, heads, 1, head_dim) to one place of frames (B,), which is what decoding does in every layer: a
        single launch instead of six."""
        if place not in self._of_one:
            with torch.inference_mode(False), torch.no_grad():
                self._of_one[place] = self._all.transpose(1, 2).narrow(2, place, 1)
        self._of_one[place].index_copy_(0, frames, states.detach() if states.requires_grad else states)

    def gather(self, frames: torch.Tensor) -> torch.Tensor:
        """(n, tokens_per_frame, heads, head_dim), a copy of n frames."""
        return self._all.index_select(0, frames)

    def tokens(
        self, gathered: torch.Tensor, first_row: int, sequences: int, columns: int, first: int, count: int
    ) -> torch.Tensor:
        """(sequences, heads, count, head_dim), one view of gathered frames, of which those from first_row on are
        `columns` for each sequence; first: which of a sequence's tokens there comes first."""
        row = self.tokens_per_frame * self._token
        return gathered.as_strided(
            (sequences, self._heads, count, self._head_dim),
            (columns * row, self._head_dim, self._token, 1),
            first_row * row + first * self._token,
        )
