"""The operator's limits as the planner reads them: pins by row, a weight budget, a quality budget, rest and speed."""

from __future__ import annotations

import numpy as np

from pagedweight.layout import BlockId, Layout, Projection
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.observe import Limits


def limits_of(config: RuntimeConfig, layout: Layout) -> Limits:
    """ValueError when a pinned expert or its width is not the model's."""
    return Limits(
        weight_bytes=config.weight_limit_bytes,
        damage=float("inf") if config.damage_limit is None else float(config.damage_limit),
        lowest_bits=_pinned_bits(config.pinned_experts, layout),
        dwell_steps=config.min_dwell_steps,
        raise_bytes=config.max_loading_bytes,
    )


def _pinned_bits(pins: tuple[tuple[int, int, int], ...], layout: Layout) -> np.ndarray | None:
    """(R,) lowest width of every row, None without pins."""
    if not pins:
        return None
    lowest = np.full(layout.rows, layout.floor_width)
    for layer, expert, bits in pins:
        if bits not in layout.widths:
            raise ValueError(f"pinned_experts asks for {bits} bits; the model has {layout.widths}")
        for projection in Projection:
            try:
                lowest[layout.row(BlockId(layer, expert, projection))] = bits
            except KeyError as error:
                raise ValueError(
                    f"pinned_experts names expert {expert} of layer {layer}, which is not one of the model's"
                ) from error
    return lowest


def cheapest_to_drop(policy: Policy, resident_bytes: np.ndarray) -> np.ndarray:
    """Rows by offline damage per byte of a drop from the parent width to the floor, cheapest first."""
    damage = np.maximum(policy.sensitivity[:, 0] - policy.sensitivity[:, -1], 0)
    released = np.maximum(resident_bytes[:, -1] - resident_bytes[:, 0], 1)
    return np.argsort(damage / released, kind="stable")
