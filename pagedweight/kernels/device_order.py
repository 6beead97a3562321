"""Where a plane's bits lie in device memory: frames of whole rows, columns interleaved for tensor-core operands.

Frame f of a plane holds rows [f * rows_per_frame, (f + 1) * rows_per_frame). Inside a frame come column blocks of 512
columns, each [rows_per_frame][16 words], then one tail block [rows_per_frame][W words] with the columns that are left.
So the frame of a row does not depend on the column, and 16 rows of a block are one contiguous, 128-byte aligned piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.bitplane import plane_words

BLOCK_COLUMNS = 512
BLOCK_WORDS = 16
BLOCK_BYTES = 4 * BLOCK_WORDS
ROW_GROUP = 16
FRAME_ALIGNMENT = 128
SMALLEST_FRAME_BYTES = 4 * 1024
LARGEST_FRAME_BYTES = 64 * 1024
# What a frame costs beside its bytes, in bytes: its address, its part of a copy, the host's time.
FRAME_COST_BYTES = 336
_TABLE_WIDTHS = (2, 3, 4, 5, 6)


class PlaneGeometry(NamedTuple):
    """How one plane of an N x K linear-block is cut into frames."""

    rows: int
    columns: int
    frame_bytes: int
    rows_per_frame: int
    frames: int

    @property
    def full_blocks(self) -> int:
        """Column blocks of 512 columns."""
        return self.columns // BLOCK_COLUMNS

    @property
    def tail_words(self) -> int:
        """Words per row of the tail block; even, 0 when 512 divides the columns."""
        return row_words(self.columns) - BLOCK_WORDS * self.full_blocks

    @property
    def words(self) -> int:
        """Stored uint32 words per row."""
        return row_words(self.columns)


def row_words(columns: int) -> int:
    """Stored uint32 words per row: ceil(K / 32), rounded up to even because columns are interleaved in word pairs."""
    return -(-columns // 64) * 2


@lru_cache(maxsize=1024)
def plane_geometry(rows: int, columns: int, frame_bytes: int) -> PlaneGeometry:
    """The cut of an N x K plane; ValueError when a frame cannot hold 16 rows or is not a multiple of 128 bytes."""
    if rows < 1 or columns < 1:
        raise ValueError(f"a plane has {rows} rows and {columns} columns; both must be at least 1")
    if frame_bytes < FRAME_ALIGNMENT or frame_bytes % FRAME_ALIGNMENT:
        raise ValueError(f"frame_bytes is {frame_bytes}; give a positive multiple of {FRAME_ALIGNMENT}")
    group_bytes = ROW_GROUP * 4 * row_words(columns)
    if frame_bytes < group_bytes:
        raise ValueError(
            f"frame_bytes is {frame_bytes}, but {ROW_GROUP} rows of {columns} columns take {group_bytes}; "
            f"give at least {group_bytes}"
        )
    rows_per_frame = ROW_GROUP * (frame_bytes // group_bytes)
    return PlaneGeometry(rows, columns, frame_bytes, rows_per_frame, -(-rows // rows_per_frame))


@lru_cache(maxsize=64)
def stored_columns(columns: int) -> np.ndarray:
    """(32 * words,) int64: the column kept at each stored position (32 * word + bit); K or more means padding."""
    words = row_words(columns)
    word, bit = np.divmod(np.arange(32 * words), 32)
    block, word = np.divmod(word, BLOCK_WORDS)
    full_blocks = columns // BLOCK_COLUMNS
    # Not words % 16: a tail of 449 to 511 columns takes 16 words too.
    block_words = np.where(block < full_blocks, BLOCK_WORDS, words - BLOCK_WORDS * full_blocks)
    nibble = bit >> 2
    q = ((bit & 3) << 2) | (((nibble >> 2) & 1) << 1) | (nibble & 1)
    j = ((word & 1) << 4) | q
    w = (word & ~1) | ((nibble >> 1) & 1)
    stored = BLOCK_COLUMNS * block + block_words * j + w
    stored.setflags(write=False)
    return stored


def to_device_order(planes: torch.Tensor, geometry: PlaneGeometry) -> torch.Tensor:
    """Planes in the checkpoint's plain order, (..., N, ceil(K / 32)) int32 on the CPU, as the bytes of their frames.

    Returns uint8 (..., frames * frame_bytes). Padding rows, columns and the unused end of each frame are zero.
    """
    plain_words = plane_words(geometry.columns)
    if planes.dtype != torch.int32 or planes.shape[-2:] != (geometry.rows, plain_words):
        raise ValueError(
            f"planes are {planes.dtype} {tuple(planes.shape)}; give int32 (..., {geometry.rows}, {plain_words})"
        )
    flat = planes.detach().contiguous().numpy().view(np.uint8).reshape(-1, geometry.rows, 4 * plain_words)
    pages = np.zeros((len(flat), geometry.frames * geometry.frame_bytes), np.uint8)
    for page, plane in zip(pages, flat, strict=True):
        _fill_frames(page, plane, geometry)
    return torch.from_numpy(pages).reshape(*planes.shape[:-2], pages.shape[1])


def from_device_order(pages: torch.Tensor, geometry: PlaneGeometry) -> torch.Tensor:
    """The inverse of `to_device_order`: uint8 (..., frames * frame_bytes) to int32 (..., N, ceil(K / 32))."""
    page_bytes = geometry.frames * geometry.frame_bytes
    if pages.dtype != torch.uint8 or pages.shape[-1] != page_bytes:
        raise ValueError(f"pages are {pages.dtype} {tuple(pages.shape)}; give uint8 (..., {page_bytes})")
    plain_words = plane_words(geometry.columns)
    flat = pages.detach().contiguous().numpy().reshape(-1, page_bytes)
    planes = np.empty((len(flat), geometry.rows, 4 * plain_words), np.uint8)
    for plane, page in zip(planes, flat, strict=True):
        plane[:] = _read_frames(page, geometry)
    return torch.from_numpy(planes.view(np.int32)).reshape(*pages.shape[:-1], geometry.rows, plain_words)


def choose_frame_bytes(shapes: Iterable[tuple[int, int]]) -> int:
    """The frame size for linear-blocks of the given (N, K), one entry each: little waste in planes and in the tables
    beside them, and few frames, each of which costs its address and its part of a copy.

    Sizes run from 4 to 64 KiB; planes smaller than 4 KiB allow smaller frames.
    """
    counted = Counter(shapes)
    if not counted:
        raise ValueError("no shapes given; name the (N, K) of at least one linear-block")
    needed = max(ROW_GROUP * 4 * row_words(columns) for _, columns in counted)
    smallest_plane = min(_payload_bytes(rows, columns) for rows, columns in counted)
    lowest = max(needed, min(SMALLEST_FRAME_BYTES, smallest_plane))
    candidates = range(lowest, max(LARGEST_FRAME_BYTES, lowest) + 1, FRAME_ALIGNMENT)
    return min(candidates, key=lambda size: (waste_with_tables(counted, size) + FRAME_COST_BYTES / size, -size))


def frame_waste(counted: Counter[tuple[int, int]], frame_bytes: int) -> float:
    """Bytes that frames hold beyond the planes' own, as a fraction of the planes' own."""
    held = sum(
        count * plane_geometry(rows, columns, frame_bytes).frames * frame_bytes
        for (rows, columns), count in counted.items()
    )
    payload = sum(count * rows * columns / 8 for (rows, columns), count in counted.items())
    return held / payload - 1


def waste_with_tables(counted: Counter[tuple[int, int]], frame_bytes: int) -> float:
    """Bytes that frames hold beyond those of planes and 16-bit tables, as a fraction of these; at the worst width."""
    return max(_waste_at(counted, frame_bytes, bits) for bits in _TABLE_WIDTHS)


def _waste_at(counted: Counter[tuple[int, int]], frame_bytes: int, bits: int) -> float:
    """Of `bits` planes of every linear-block, its table and the narrowest width's."""
    held = payload = 0
    for (rows, columns), count in counted.items():
        tables = [2 * rows * 2**width for width in {bits, _TABLE_WIDTHS[0]}]
        frames = bits * plane_geometry(rows, columns, frame_bytes).frames + sum(-(-t // frame_bytes) for t in tables)
        held += count * frames * frame_bytes
        payload += count * (bits * rows * columns / 8 + sum(tables))
    return held / payload - 1


def _payload_bytes(rows: int, columns: int) -> int:
    return -(-rows // ROW_GROUP) * ROW_GROUP * 4 * row_words(columns)


def _fill_frames(page: np.ndarray, plane: np.ndarray, geometry: PlaneGeometry) -> None:
    rows = np.zeros((geometry.frames * geometry.rows_per_frame, 4 * geometry.words), np.uint8)
    full = BLOCK_BYTES * geometry.full_blocks
    if full:
        rows[: geometry.rows, :full] = _interleaved(plane[:, :full])
    if geometry.tail_words:
        rows[: geometry.rows, full:] = _permuted(plane[:, full:], geometry.columns % BLOCK_COLUMNS)
    for piece, first, last in _pieces(page, geometry):
        piece[:] = rows[:, first:last].reshape(piece.shape)


def _read_frames(page: np.ndarray, geometry: PlaneGeometry) -> np.ndarray:
    rows = np.empty((geometry.frames * geometry.rows_per_frame, 4 * geometry.words), np.uint8)
    for piece, first, last in _pieces(page, geometry):
        rows[:, first:last] = piece.reshape(len(rows), last - first)
    full = BLOCK_BYTES * geometry.full_blocks
    plane = np.empty((geometry.rows, 4 * plane_words(geometry.columns)), np.uint8)
    if full:
        plane[:, :full] = _interleaved_back(rows[: geometry.rows, :full])
    if geometry.tail_words:
        plane[:, full:] = _permuted_back(rows[: geometry.rows, full:], geometry.columns % BLOCK_COLUMNS)
    return plane


def _interleaved(plane: np.ndarray) -> np.ndarray:
    """Rows of whole column blocks in stored order, (N, bytes) uint8 both.

    Column 16 j + w goes to word 2 (w // 2) + j // 16. With j = 16 s + 4 a + 2 b + c, the bits of one w in the eight j
    of equal s and b become one byte: 8 x 8 bit matrices are transposed, and whole bytes go where they belong.
    """
    # Byte by byte of a block: (s, a, b, c, half of w) x (rows and blocks), contiguous along the latter.
    across = np.ascontiguousarray(plane.reshape(-1, BLOCK_BYTES).T).reshape(2, 4, 2, 2, 2, -1)
    eights = _transposed_bits(across.transpose(3, 1, 0, 2, 4, 5)).reshape(4, 2, 2, 2, 2, -1)
    # Now (w // 2 in its half, w % 2, s, b, half). Stored: (half, w // 2, s, b, w % 2).
    stored = eights.transpose(4, 0, 2, 3, 1, 5).reshape(BLOCK_BYTES, -1)
    return np.ascontiguousarray(stored.T).reshape(plane.shape)


def _interleaved_back(stored: np.ndarray) -> np.ndarray:
    """The inverse of `_interleaved`, step by step."""
    across = np.ascontiguousarray(stored.reshape(-1, BLOCK_BYTES).T).reshape(2, 4, 2, 2, 2, -1)
    eights = _transposed_bits(across.transpose(1, 4, 2, 3, 0, 5)).reshape(2, 4, 2, 2, 2, -1)
    plane = eights.transpose(2, 1, 3, 0, 4, 5).reshape(BLOCK_BYTES, -1)
    return np.ascontiguousarray(plane.T).reshape(stored.shape)


def _transposed_bits(eights: np.ndarray) -> np.ndarray:
    """Eight bytes along the first two axes (together 8), as the rows of 8 x 8 bit matrices, transposed: bit i of byte t
    becomes bit t of byte i. (8, ...) uint8.
    """
    rows = eights.reshape(8, -1)  # a copy
    for distance, mask in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        pairs = rows.reshape(4 // distance, 2, distance, -1)
        low, high = pairs[:, 0], pairs[:, 1]
        swapped = ((low >> distance) ^ high) & mask
        high ^= swapped
        low ^= swapped << distance
    return rows


def _permuted(plane: np.ndarray, columns: int) -> np.ndarray:
    """Rows of so many columns in stored order, bit by bit: for a tail, where columns do not fall on whole bytes."""
    bits = np.zeros((len(plane), columns + 1), np.uint8)
    bits[:, :-1] = np.unpackbits(plane, axis=1, bitorder="little", count=columns)
    # Every padding position takes the zero column at the end.
    positions = np.minimum(stored_columns(columns), columns)
    return np.packbits(np.take(bits, positions, axis=1), axis=1, bitorder="little")


def _permuted_back(stored: np.ndarray, columns: int) -> np.ndarray:
    bits = np.zeros((len(stored), 32 * plane_words(columns)), np.uint8)
    # argsort of a permutation is its inverse; padding positions sort last.
    positions = np.argsort(stored_columns(columns))[:columns]
    bits[:, :columns] = np.take(np.unpackbits(stored, axis=1, bitorder="little"), positions, axis=1)
    return np.packbits(bits, axis=1, bitorder="little")


def _pieces(page: np.ndarray, geometry: PlaneGeometry) -> list[tuple[np.ndarray, int, int]]:
    """(view (frames, rows_per_frame, bytes), first, last byte of a row) of each column block."""
    frames = page.reshape(geometry.frames, geometry.frame_bytes)
    widths = [BLOCK_WORDS] * geometry.full_blocks + [geometry.tail_words] * (geometry.tail_words > 0)
    pieces, first = [], 0
    for words in widths:
        last = first + 4 * words
        offset = geometry.rows_per_frame * first
        block = frames[:, offset : offset + geometry.rows_per_frame * 4 * words]
        pieces.append((block.reshape(geometry.frames, geometry.rows_per_frame, 4 * words), first, last))
        first = last
    return pieces
