"""One reading of a server's metrics: what `pagedweight top` shows, from our server's names or from vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

OURS, VLLM = "pagedweight_", "pagedweight:"


class Reading(NamedTuple):
    """Metrics at one moment; what a server does not say is 0 or empty.

    seconds: of the reader's clock. memory: bytes by what holds them, in the order in which they are drawn.
    layer_bits: mean bits by layer. rows_at: linear-blocks by width.
    """

    seconds: float
    mean_bits: float
    memory: Mapping[str, float]
    layer_bits: Mapping[str, float]
    rows_at: Mapping[str, float]
    lowered: float
    raised: float
    released_bytes: float
    loaded_bytes: float
    stalled_seconds: float
    shortfall_bytes: float
    in_flight_bytes: float
    running: float
    answered: float

    def rates(self, before: Reading) -> dict[str, float]:
        """What has grown since an earlier reading, a second; 0 where the server has started anew."""
        span = self.seconds - before.seconds
        names = ("lowered", "raised", "released_bytes", "loaded_bytes", "stalled_seconds", "answered")
        return {n: max(0.0, getattr(self, n) - getattr(before, n)) / span if span > 0 else 0.0 for n in names}


def parse(text: str, seconds: float) -> Reading:
    """ValueError when the text is no metrics, or none of a server with paged experts."""
    samples: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
            for value in sample.labels.values():
                labelled.setdefault(sample.name, {})[value] = sample.value
    if f"{OURS}mean_bits" in samples:
        return _ours(samples, labelled, seconds)
    if f"{VLLM}mean_bits" in samples:
        return _vllm(samples, seconds)
    raise ValueError("the metrics have no mean_bits of pagedweight; is a quantized model served there?")


def _ours(samples: Mapping[str, float], labelled: Mapping[str, Mapping[str, float]], seconds: float) -> Reading:
    held = labelled[f"{OURS}bytes"]
    rows, moved = labelled[f"{OURS}moved_rows_total"], labelled[f"{OURS}moved_bytes_total"]
    return Reading(
        seconds=seconds,
        mean_bits=samples[f"{OURS}mean_bits"],
        memory={"planes": held["plane"], "tables": held["table"], "KV cache": held["kv"], "free": held["free"]},
        layer_bits=labelled[f"{OURS}layer_bits"],
        rows_at=labelled[f"{OURS}linear_blocks"],
        lowered=rows["lowered"],
        raised=rows["raised"],
        released_bytes=moved["released"],
        loaded_bytes=moved["loaded"],
        stalled_seconds=samples[f"{OURS}stalled_seconds_total"],
        shortfall_bytes=samples[f"{OURS}shortfall_bytes"],
        in_flight_bytes=samples[f"{OURS}in_flight_bytes"],
        running=samples.get(f"{OURS}requests_running", 0.0),
        answered=samples.get(f"{OURS}requests_total", 0.0),
    )


def _vllm(samples: Mapping[str, float], seconds: float) -> Reading:
    """vLLM's names; bytes are of one rank, moves are counted in linear-blocks alone."""

    def own(name: str) -> float:
        return samples.get(f"{VLLM}{name}", 0.0)

    return Reading(
        seconds=seconds,
        mean_bits=own("mean_bits"),
        memory={
            "resident": own("resident_bytes"),
            "paged": own("paged_bytes"),
            "KV cache": own("kv_bytes"),
            "free": own("free_bytes"),
        },
        layer_bits={},
        rows_at={},
        lowered=own("lowered"),
        raised=own("raised"),
        released_bytes=0.0,
        loaded_bytes=0.0,
        stalled_seconds=0.0,
        shortfall_bytes=own("shortfall_bytes"),
        in_flight_bytes=0.0,
        running=samples.get("vllm:num_requests_running", 0.0),
        answered=samples.get("vllm:request_success_total", 0.0),
    )
