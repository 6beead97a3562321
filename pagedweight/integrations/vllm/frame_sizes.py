"""The frame size for planes that live in KV blocks: whole frames in a block's pieces, little waste in the planes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pagedweight.kernels.device_order import (
    FRAME_ALIGNMENT,
    LARGEST_FRAME_BYTES,
    ROW_GROUP,
    frame_waste,
    row_words,
)


def choose_frame_bytes_for_kv(shapes: Sequence[tuple[int, int]], piece_bytes: int) -> int:
    """Of the sizes that divide a piece, the one that wastes least of the planes of these (N, K); ties to the largest.

    ValueError when a piece is smaller than the smallest frame.
    """
    counted = Counter(shapes)
    needed = max(ROW_GROUP * 4 * row_words(columns) for _, columns in counted)
    least = max(1, -(-piece_bytes // LARGEST_FRAME_BYTES))
    sizes = [piece_bytes // parts for parts in range(least, piece_bytes // needed + 1) if piece_bytes % parts == 0]
    fitting = [size for size in sizes if size % FRAME_ALIGNMENT == 0]
    if not fitting:
        raise ValueError(
            f"a layer's part of a KV block has {piece_bytes} bytes and a frame of these planes at least {needed}; "
            "give a larger block_size, or serve at fixed pagedweight.bits"
        )
    # To a tenth of a percent: below that, longer copies are worth more than the bytes.
    return min(fitting, key=lambda size: (round(frame_waste(counted, size), 3), -size))
