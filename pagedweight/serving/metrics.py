"""Prometheus metrics of one served model: the runtime's accounts, read at each scrape, and what requests came to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)


class RuntimeCollector(Collector):
    """The runtime's accounts as they are when they are asked for."""

    def __init__(self, paged: Any) -> None:
        self._paged = paged
        layout = paged.layout
        self._layer = np.repeat(np.arange(len(layout.moe_layers)), [2 * layer.experts for layer in layout.moe_layers])
        self._names = [str(layer.layer) for layer in layout.moe_layers]

    def collect(self) -> Iterator[Metric]:
        seen = self._paged.glance()
        yield GaugeMetricFamily("pagedweight_mean_bits", "Mean bits of routed expert weights.", seen.mean_bits)
        layers = GaugeMetricFamily("pagedweight_layer_bits", "Mean bits of a layer's linear-blocks.", labels=["layer"])
        bits = np.bincount(self._layer, seen.bits) / np.bincount(self._layer)
        for name, value in zip(self._names, bits.tolist(), strict=True):
            layers.add_metric([name], value)
        yield layers
        held = GaugeMetricFamily("pagedweight_bytes", "Bytes of the arena by owner.", labels=["owner"])
        for owner, count in seen.bytes_by_owner.items():
            held.add_metric([owner], count)
        yield held
        yield from _widths(seen, self._paged.layout.widths)
        yield from _moves(seen)


def _widths(seen: Any, widths: tuple[int, ...]) -> Iterator[Metric]:
    rows = GaugeMetricFamily("pagedweight_linear_blocks", "Linear-blocks at each width.", labels=["bits"])
    for width in widths:
        rows.add_metric([str(width)], int((seen.bits == width).sum()))
    yield rows
    free = 0 if seen.kv is None else seen.kv.free_blocks
    yield GaugeMetricFamily("pagedweight_free_kv_blocks", "KV blocks that are free.", free)
    yield GaugeMetricFamily("pagedweight_in_flight_bytes", "Bytes on their way in or out.", seen.in_flight_bytes)
    yield GaugeMetricFamily(
        "pagedweight_shortfall_bytes", "What the last plan under pressure could not release.", seen.shortfall_bytes
    )


def _moves(seen: Any) -> Iterator[Metric]:
    moves = seen.moves
    yield CounterMetricFamily("pagedweight_boundaries", "Boundaries between forwards.", seen.step)
    rows = CounterMetricFamily("pagedweight_moved_rows", "Linear-blocks moved.", labels=["way"])
    for way in ("lowered", "raised", "deferred", "cancelled"):
        rows.add_metric([way], getattr(moves, f"{way}_rows"))
    yield rows
    size = CounterMetricFamily("pagedweight_moved_bytes", "Bytes moved.", labels=["way"])
    for way in ("released", "loaded", "written_back", "relocated"):
        size.add_metric([way], getattr(moves, f"{way}_bytes"))
    yield size
    yield CounterMetricFamily("pagedweight_stalled_seconds", "Time waited for the device.", moves.stalled_seconds)


class Requests:
    """What clients asked and got."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answered = Counter("pagedweight_requests", "Requests answered.", ["endpoint", "status"], registry=registry)
        self.running = Gauge("pagedweight_requests_running", "Requests being answered.", registry=registry)
        self.seconds = Histogram(
            "pagedweight_request_seconds", "From a request to its last byte.", buckets=SECONDS, registry=registry
        )


def registry_of(paged: Any) -> CollectorRegistry:
    """A registry of its own, so that two servers in one process do not meet."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RuntimeCollector(paged))
    return registry
