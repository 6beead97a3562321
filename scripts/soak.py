"""Serve mixed traffic on the shipped model for as long as one likes, and see that nothing grows, drifts or changes.

    python scripts/soak.py --minutes 30 --out bench/results/cpu-soak.json
    python scripts/soak.py --minutes 8 --device cuda --dtype bfloat16 --out bench/results/h200-soak.json

A term patches the model with a budget of its own, serves, and unpatches it. Before every forward what kernels will read
is compared with the host's pages and tables (tests/fuzz/traffic.py). At the beginning and the end of each term fixed
prompts are answered at fixed widths; every answer must be the first term's, bit for bit. Memory is looked at between
terms. The record is written anew at every term's end, so a run that is cut leaves what it has seen; exit status 1 when
anything differs or memory grows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import pagedweight
from pagedweight import RuntimeConfig
from pagedweight.evaluation.record import command, machine, versions
from tests.fuzz.traffic import Traffic

CHECKPOINT = Path(pagedweight.__file__).parent / "assets" / "tiny-qwen2-moe"
WIDTHS = (2, 3, 4, 5, 6)
TERM_SECONDS = 40.0
SETTLING_SHARE = 0.25  # of a run: caches, allocators and compiled kernels come to rest
GROWTH_MIB_PER_MINUTE = 0.25  # what may be noise; a leak of one page of this model a second is 0.35
JUDGED_TERMS = 8  # below, a slope says nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--term-seconds", type=float, default=TERM_SECONDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    soak = Soak(torch.device(options.device), getattr(torch, options.dtype), options.seed)
    deadline = time.monotonic() + 60 * options.minutes
    while time.monotonic() < deadline:
        soak.term(min(deadline, time.monotonic() + options.term_seconds))
        report = soak.report()
        print(json.dumps({name: report[name] for name in ("minutes", "counts", "moved", "memory", "ok")}), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["ok"] else 1


class Soak:
    """Terms on one model, and what has been seen of them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device, self._dtype, self._seed = device, dtype, seed
        self._rng = np.random.default_rng(seed)
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        self._answers: dict[int, str] = {}
        self._changed: list[str] = []
        self._memory: list[dict[str, float]] = []
        model = pagedweight.load(CHECKPOINT, dtype=dtype, device_map=device, verify=False)
        if device.type == "cuda":
            # cuDNN keeps a plan for every length that it has seen, which would look like a leak.
            torch.backends.cuda.enable_cudnn_sdp(False)
            pagedweight.compile_kernels(model)
        self._resident = model.pagedweight.store.sizes.resident_bytes().sum(0)
        self._model = pagedweight.unpatch(model)

    def term(self, until: float) -> None:
        """One budget, from patching to unpatching."""
        pagedweight.patch(self._model, checkpoint=CHECKPOINT, config=self._config(), keep_original=True)
        traffic = Traffic(self._model, self._rng, self._counts)
        self._probe(traffic)
        while time.monotonic() < until:
            traffic.step()
        self._probe(traffic)
        traffic.leave()
        self._moved.update(self._model.pagedweight.snapshot().moves._asdict())
        pagedweight.unpatch(self._model)
        del traffic
        self._counts["terms"] += 1
        self._memory.append(self._seen_memory())

    def report(self) -> dict[str, object]:
        memory = self._memory[int(SETTLING_SHARE * len(self._memory)) :]
        growth = {name: slope(memory, name) for name in memory[0] if name != "minute"}
        bounded = [name for name in growth if name.endswith("mib") and len(memory) >= JUDGED_TERMS]
        grown = [name for name in bounded if growth[name] >= GROWTH_MIB_PER_MINUTE]
        whole = set(self._answers) == set(WIDTHS)
        return {
            "command": command("scripts/soak.py"),
            "machine": machine(str(self._device)),
            "versions": versions(),
            "dtype": str(self._dtype),
            "seed": self._seed,
            "minutes": (time.monotonic() - self._began) / 60,
            "terms": self._counts["terms"],
            "counts": dict(self._counts),
            "moved": dict(self._moved),
            "answers": self._answers,
            "answers that changed": self._changed,
            "memory": {"first": memory[0], "last": memory[-1], "growth per minute": growth},
            "memory by term": self._memory,
            "ok": whole and not self._changed and not grown,
        }

    def _config(self) -> RuntimeConfig:
        """A budget between what the floor needs with a few requests and more than everything needs."""
        rng, (low, high) = self._rng, (int(self._resident[0]), int(self._resident[-1]))
        roomy = rng.random() < 0.4
        budget = int(rng.uniform(1.1 * high, 1.6 * high) if roomy else rng.uniform(1.5 * low, 1.1 * high))
        return RuntimeConfig(
            budget_bytes=budget,
            offload_free_blocks=4,
            reload_free_blocks=8,
            min_dwell_steps=int(rng.integers(1, 5)),
            plan_period_steps=int(rng.integers(1, 9)),
            max_requests=int(rng.integers(1, 4)),
            forecast_tokens=int(rng.choice([0, 8])),
            background_rows=int(rng.choice([1, 10**9])),
            host_pinned_bytes=[None, 0, high // 2][rng.integers(3)],
            deterministic=bool(rng.random() < 0.2),
        )

    def _probe(self, traffic: Traffic) -> None:
        for bits in traffic.paged.layout.widths:
            answer = traffic.answers(bits)
            if answer is not None and self._answers.setdefault(bits, answer) != answer:
                self._changed.append(f"{bits} bits in term {self._counts['terms']}")

    def _seen_memory(self) -> dict[str, float]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free but kept for later is no growth
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        seen = {
            "minute": (time.monotonic() - self._began) / 60,
            "host_mib": (resident - shared) * 4096 / 2**20,
            "threads": threading.active_count(),
            "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        }
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            seen["device_mib"] = torch.cuda.memory_allocated() / 2**20
            seen["reserved_mib"] = torch.cuda.memory_reserved() / 2**20
        return seen


def slope(seen: list[dict[str, float]], name: str) -> float:
    """Per minute, by least squares; 0 while there is no second one."""
    if len(seen) < 2:
        return 0.0
    return float(np.polyfit([one["minute"] for one in seen], [one[name] for one in seen], 1)[0])


if __name__ == "__main__":
    sys.exit(main())
