"""Mixed widths in the bytes of a uniform one."""

from __future__ import annotations

import numpy as np

from bench.e2e.drawn import Drawn


def held_bytes(drawn: Drawn, bits: np.ndarray) -> int:
    """Arena bytes of planes and tables."""
    sizes = drawn.store.host.sizes
    return int(sizes.resident_bytes()[np.arange(len(bits)), np.searchsorted(sizes.widths, bits)].sum())


def mixed_bits(drawn: Drawn, width: int) -> np.ndarray | None:
    """(R,): at random a third of the rows of each projection one bit up and a third one bit down, then rows back or
    further rows up until as many bytes are held as at the uniform width, no more. None at the lowest and highest width.
    """
    if width in (drawn.store.layout.widths[0], drawn.store.layout.widths[-1]):
        return None
    rng, rows = np.random.default_rng(width), drawn.store.layout.rows
    bits, raised, level = np.full(rows, width), [], []
    for projection in range(2):
        order = 2 * rng.permutation(rows // 2) + projection
        third = len(order) // 3
        bits[order[:third]] += 1
        bits[order[third : 2 * third]] -= 1
        raised.append(order[:third])
        level.append(order[2 * third :])
    limit = held_bytes(drawn, np.full(rows, width))
    for row in rng.permutation(np.concatenate(raised)):
        if held_bytes(drawn, bits) <= limit:
            break
        bits[row] = width
    for row in rng.permutation(np.concatenate(level)):
        bits[row] += 1
        if held_bytes(drawn, bits) > limit:
            bits[row] = width
            break
    return bits
