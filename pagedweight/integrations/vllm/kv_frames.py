"""Where frames lie inside KV blocks: a block is a piece of every layer's cache tensor, a piece holds whole frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch


class Piece(NamedTuple):
    """A contiguous part of each block: block b's is at address + b * stride, `bytes` long."""

    address: int
    stride: int
    bytes: int


class BlockFrames:
    """The frames of every block of a KV cache, the same places in each."""

    def __init__(self, tensors: Iterable[torch.Tensor], blocks: int, frame_bytes: int) -> None:
        pieces = merged([piece for tensor in tensors for piece in pieces_of(tensor, blocks)])
        starts, strides = [], []
        for piece in pieces:
            for start in range(0, piece.bytes - frame_bytes + 1, frame_bytes):
                starts.append(piece.address + start)
                strides.append(piece.stride)
        if not starts:
            largest = max((piece.bytes for piece in pieces), default=0)
            raise ValueError(
                f"a frame of {frame_bytes} bytes fits no layer's part of a KV block, the largest is {largest} bytes; "
                "give a larger block_size, or smaller pagedweight.frame_bytes"
            )
        self._start, self._stride = np.array(starts, dtype=np.int64), np.array(strides, dtype=np.int64)

    @property
    def per_block(self) -> int:
        return len(self._start)

    def address(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 absolute addresses."""
        return self._start[positions] + blocks * self._stride[positions]

    def aligned(self, alignment: int) -> bool:
        return not ((self._start | self._stride) % alignment).any()


def pieces_of(tensor: torch.Tensor, blocks: int) -> list[Piece]:
    """The contiguous runs of one block in a layer's cache tensor, whatever its layout.

    One dimension counts blocks, or the equal parts into which an attention backend cuts each of them.
    """
    counts = [dim for dim, size in enumerate(tensor.shape) if size >= blocks and size % blocks == 0]
    if not counts:
        raise ValueError(f"a KV cache tensor of shape {tuple(tensor.shape)} has no dimension of {blocks} blocks")
    dim = counts[0]
    parts = tensor.shape[dim] // blocks
    size = tensor.element_size()
    rest = [(tensor.stride(d), tensor.shape[d]) for d in range(tensor.dim()) if d != dim and tensor.shape[d] > 1]
    if parts > 1:
        rest.append((tensor.stride(dim), parts))
    run, outer = 1, []
    for stride, count in sorted(rest):
        if stride == run:
            run *= count
        else:
            outer.append((stride, count))
    offsets = np.zeros(1, dtype=np.int64)
    for stride, count in outer:
        offsets = (offsets[:, None] + stride * np.arange(count)).ravel()
    stride_bytes = tensor.stride(dim) * parts * size
    return [Piece(tensor.data_ptr() + int(offset) * size, stride_bytes, run * size) for offset in offsets]


def merged(pieces: list[Piece]) -> list[Piece]:
    """Pieces by address, each byte once: layers of several KV groups may share one tensor, and K may lie beside V."""
    joined: list[Piece] = []
    for piece in sorted(pieces):
        last = joined[-1] if joined else None
        if last and piece.stride == last.stride and piece.address <= last.address + last.bytes:
            end = max(last.address + last.bytes, piece.address + piece.bytes)
            # A block's piece must end where the next block's begins.
            joined[-1] = last._replace(bytes=min(end - last.address, last.stride))
        else:
            joined.append(piece)
    return joined
