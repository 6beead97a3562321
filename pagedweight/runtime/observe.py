"""What the planner sees of one step: KV pressure, routing mass (Eq. 1) and input features (phi of Eq. 5).

Statistics are merged over requests on their own device (merge_requests, no wait); observe brings them to the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.layout import RoutingStats
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.table_view import TableSnapshot


class Limits(NamedTuple):
    """What the operator allows, on top of the calibrated policy.

    weight_bytes: bytes that expert weights may hold at most, whatever the KV cache needs.
    damage: predicted damage, against every block at the parent width, that lowering may never exceed.
    lowest_bits: (R,) lowest width of each row, None for no pins; a pinned expert has its own width here.
    dwell_steps: boundaries a row keeps its width before it may be raised.
    raise_bytes: most bytes one raising plan may move to the device, None for no limit.
    """

    weight_bytes: int | None = None
    damage: float = math.inf
    lowest_bits: np.ndarray | None = None
    dwell_steps: int = 0
    raise_bytes: int | None = None


class Observation(NamedTuple):
    """O_t: one step as the planner sees it. Everything that live statistics would give may be None.

    kv: KV pressure; threshold_blocks: T_blk of Eq. (7).
    mass: float64 (L, E), routing mass per layer (Eq. 1), a row of zeros for a layer that saw no token.
    routed: float64 (L,), how many routed tokens that mass comes from; None takes it as it is, however few.
    features: float64 (R, 3), phi of Eq. (5) as the policy's heads read it, merged over requests.
    confidence: float64 (R,), from 0 to 1: the share, by KV blocks, of the requests that saw the row.
    rho_bounds: the merged clipping bounds of Eq. (6), None for the policy's.
    in_flight_bytes: bytes that earlier plans release but kv does not show yet; they count as released.
    forecast_blocks: KV blocks that admitted and queued requests are expected to need soon; 0 switches forecasts off.
    """

    kv: KVState
    threshold_blocks: int = 0
    mass: np.ndarray | None = None
    routed: np.ndarray | None = None
    features: np.ndarray | None = None
    confidence: np.ndarray | None = None
    rho_bounds: tuple[float, float] | None = None
    in_flight_bytes: int = 0
    forecast_blocks: int = 0
    limits: Limits = Limits()


class Signals(NamedTuple):
    """Request-level statistics merged into one batch-level table; tensors on the statistics' device, float32.

    mass: (L, E), Eq. (1). routed: (L,), routed tokens behind it: as many from one request would tell as much.
    features: (L, E, 2, 3), phi as heads read it. confidence: (L, E), from 0 to 1.
    rho_bounds: (2,), clipping bounds of Eq. (6), None where no request has its own.
    """

    mass: torch.Tensor
    routed: torch.Tensor
    features: torch.Tensor
    confidence: torch.Tensor
    rho_bounds: torch.Tensor | None = None


def merge_requests(
    stats: RoutingStats,
    kv_blocks: torch.Tensor | None = None,
    request_confidence: torch.Tensor | None = None,
    request_rho_bounds: torch.Tensor | None = None,
    *,
    log_features: bool = False,
) -> Signals:
    """Average the requests' signals by the KV blocks they hold; nothing waits for the device.

    kv_blocks: (R_s,) blocks held by each request slot, 0 for a free slot; None weighs slots with tokens alike.
    request_confidence: (R_s,) from 0 to 1, how far each request's features are trusted; None for 1.
    request_rho_bounds: (R_s, 2), each request's clipping bounds; None for the policy's everywhere.
    Residual heads are linear, so averaging features is averaging residuals. A request without a token in some layer
    or expert has no signal there: the others' weights are renormalised, and confidence falls by its share.
    """
    mass = torch.nan_to_num(stats.mass.float(), nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0)
    layer_mass = mass.sum(-1, keepdim=True)
    weights = (layer_mass.amax(1)[:, 0] > 0).float() if kv_blocks is None else kv_blocks.to(mass).clamp_min(0)
    share = weights / weights.sum().clamp_min(1e-30)
    share = share[:, None, None]

    seen_layer = (layer_mass > 0).float() * share
    seen_share = seen_layer.sum(0).clamp_min(1e-30)
    merged_mass = (seen_layer * mass / layer_mass.clamp_min(1e-30)).sum(0) / seen_share
    # The variance of a weighted mean: many tokens of a request that holds few blocks say little.
    tokens = stats.counts.sum(-1, keepdim=True).float()
    spread = ((seen_layer / seen_share).square() / tokens.clamp_min(1)).sum(0)
    routed = torch.where(spread > 0, 1 / spread.clamp_min(1e-30), 0.0)[:, 0]

    phi = request_features(mass, stats.features.float())
    seen = (mass > 0) & torch.isfinite(phi).all(-1).all(-1)
    if log_features:
        phi = phi.clamp_min(1e-30).log()
    phi = torch.where(seen[..., None, None], phi, 0.0)
    weight = seen.float() * share
    merged_features = (weight[..., None, None] * phi).sum(0) / weight.sum(0).clamp_min(1e-30)[..., None, None]
    trusted = weight if request_confidence is None else weight * request_confidence.to(mass)[:, None, None]
    bounds = None if request_rho_bounds is None else (share[:, 0, 0, None] * request_rho_bounds.to(mass)).sum(0)
    return Signals(merged_mass, routed, merged_features, trusted.sum(0), bounds)


def request_features(mass: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """phi: routing-weighted mean, RMS and largest input norm; (..., 2, 3) from sums of that shape and (...) mass."""
    weight = mass.clamp_min(1e-30)[..., None]
    mean, mean_square, largest = sums[..., 0] / weight, sums[..., 1] / weight, sums[..., 2]
    return torch.stack([mean, mean_square.clamp_min(0).sqrt(), largest], dim=-1)


def observe(
    table: TableSnapshot, kv: KVState, threshold_blocks: int, signals: Signals | None = None, **rest: object
) -> Observation:
    """The Observation of one step; signals (None before any token) are copied to the host, which waits for them.

    rest: Observation's other fields (in_flight_bytes, forecast_blocks, limits).
    """
    if signals is None:
        return Observation(kv, threshold_blocks, **rest)
    mass, routed, features, confidence = (t.detach().to("cpu", torch.float64).numpy() for t in signals[:4])
    bounds = None if signals.rho_bounds is None else tuple(signals.rho_bounds.tolist())
    return Observation(
        kv,
        threshold_blocks,
        mass=mass,
        routed=routed,
        features=features[table.layer, table.expert, table.projection],
        confidence=confidence[table.layer, table.expert],
        rho_bounds=bounds,
        **rest,
    )


def forecast_blocks(growth_tokens: int, queued_requests: int, tokens_per_queued: int, block_tokens: int) -> int:
    """KV blocks expected soon: tokens that admitted requests will still write, and what queued requests will."""
    expected_tokens = max(0, growth_tokens) + max(0, queued_requests) * max(0, tokens_per_queued)
    return -(-expected_tokens // block_tokens)
