"""What gradients cannot see: routers further on that flip, and layers that bend. Measured once per layer and width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import nn

from pagedweight.calibration.divergence import Reference, diverge
from pagedweight.calibration.sensitivity import Sensitivity
from pagedweight.calibration.substitution import Substitution
from pagedweight.layout import Layout

# A smaller divergence says nothing about its cause. In a 16-bit model rounding alone moves answers by some 1e-4 nats as
# soon as anything differs, which is more than what a layer at 5 or 6 bits does.
KL_RESOLUTION_NATS = 1e-6
KL_RESOLUTION_NATS_16_BITS = 1e-3
LARGEST_GAIN = 8.0


def measure_gains(
    model: nn.Module,
    reference: Reference,
    layout: Layout,
    sensitivity: Sensitivity,
    substitution: Substitution,
    advance: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """(L, 2, W): measured over predicted divergence of one layer's one projection at one width, the rest untouched.

    reference: of the model's own weights, on calibration text. A divergence too small to measure in the model's dtype,
    or one that is predicted to be next to none, takes the gain of the next lower width. The model ends with its own
    weights.
    """
    gains = np.ones((len(layout.moe_layers), 2, len(layout.widths)))
    predicted = sensitivity.s_bar * sensitivity.m_cal[:, None]
    resolution = KL_RESOLUTION_NATS_16_BITS if reference.hidden.dtype.itemsize == 2 else KL_RESOLUTION_NATS
    for layer_index, shape in enumerate(layout.moe_layers):
        first = layout.first_row(layer_index)
        for projection in (0, 1):
            rows = np.arange(first + projection, first + 2 * shape.experts, 2)
            for w, bits in enumerate(layout.widths):
                plan = np.zeros(layout.rows, dtype=np.int64)
                plan[rows] = bits
                substitution.write(plan)
                kl = float(diverge(model, reference).kl.mean())
                expected = float(predicted[rows, w].sum())
                if kl > resolution and expected > KL_RESOLUTION_NATS:
                    gains[layer_index, projection, w] = np.clip(kl / expected, 1 / LARGEST_GAIN, LARGEST_GAIN)
                elif w:
                    gains[layer_index, projection, w] = gains[layer_index, projection, w - 1]
                advance()
    substitution.write(np.zeros(layout.rows, dtype=np.int64))
    return gains


def with_gains(sensitivity: Sensitivity, layout: Layout, gains: np.ndarray) -> Sensitivity:
    """The sensitivity scaled by measured gains (L, 2, W)."""
    by_row = [np.tile(gains[index], (shape.experts, 1)) for index, shape in enumerate(layout.moe_layers)]
    return sensitivity._replace(s_bar=sensitivity.s_bar * np.concatenate(by_row))
