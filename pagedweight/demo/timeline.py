"""What the demo records after every forward, and the rows it prints of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple


class Phase(enum.Enum):
    """What the demo was doing."""

    GENERATE = "generate"
    IDLE = "idle"
    READ = "read"


class Sample(NamedTuple):
    """The arena after one forward. The four byte counts sum to the arena; mean_bits is weighted by a row's weights."""

    step: int
    phase: Phase
    tokens: int
    planes_bytes: int
    tables_bytes: int
    kv_bytes: int
    free_bytes: int
    kv_blocks: int
    mean_bits: float
    moving_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.planes_bytes + self.tables_bytes


class Recorder:
    """Takes a sample of one patched model's runtime whenever it is asked to, and keeps them in order."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.samples: list[Sample] = []

    def record(self, phase: Phase, tokens: int) -> Sample:
        """tokens: how many the sequence has so far."""
        seen = self._runtime.snapshot()
        held = seen.bytes_by_owner
        sample = Sample(
            step=len(self.samples),
            phase=phase,
            tokens=tokens,
            planes_bytes=held["plane"],
            tables_bytes=held["table"],
            kv_bytes=held["kv"],
            free_bytes=held["free"],
            kv_blocks=-(-held["kv"] // seen.kv.block_bytes),
            mean_bits=seen.mean_bits,
            moving_bytes=seen.loading_bytes + seen.releasing_bytes,
        )
        self.samples.append(sample)
        return sample


def thinned(samples: Sequence[Sample], rows: int) -> list[Sample]:
    """At most about `rows` samples, evenly spaced, with the first and last of each phase always among them."""
    every = max(1, len(samples) // rows)
    ends = {
        i
        for i, sample in enumerate(samples)
        if i in (0, len(samples) - 1) or sample.phase != samples[i - 1].phase or sample.phase != samples[i + 1].phase
    }
    near = {i + d for i in ends for d in range(-every // 2, every // 2 + 1)} - ends
    return [s for i, s in enumerate(samples) if i in ends or (i % every == 0 and i not in near)]
