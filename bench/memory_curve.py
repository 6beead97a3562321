"""Memory over time while something runs: tensors on the GPU, and the process's own pages on the host."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

PAGE_BYTES = 4096
MOST_SAMPLES = 400  # kept of a run, the largest of each stretch: a peak is never thinned out


class Sample(NamedTuple):
    """seconds: since the start. device_bytes: of tensors on the current GPU. host_bytes: beyond those at the start."""

    seconds: float
    device_bytes: int
    host_bytes: int


class MemoryCurve:
    """Samples memory on a thread of its own while the context is open.

    Host bytes are resident pages that are no file's, so that a file that is read through the page cache does not count.
    """

    def __init__(self, every_s: float = 0.01) -> None:
        self.samples: list[Sample] = []
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryCurve:
        self._began, self._host = time.perf_counter(), _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            self.samples.append(Sample(time.perf_counter() - self._began, device, _anonymous_bytes() - self._host))

    def thinned(self) -> dict[str, list[float]]:
        """At most MOST_SAMPLES stretches: the last second, and the most device and host bytes, of each."""
        size = max(1, -(-len(self.samples) // MOST_SAMPLES))
        stretches = [self.samples[at : at + size] for at in range(0, len(self.samples), size)]
        return {
            "seconds": [round(own[-1].seconds, 3) for own in stretches],
            "device_bytes": [max(s.device_bytes for s in own) for own in stretches],
            "host_bytes": [max(s.host_bytes for s in own) for own in stretches],
        }


def _anonymous_bytes() -> int:
    resident, shared = (int(word) for word in Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE_BYTES
