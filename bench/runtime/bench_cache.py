"""What the arena's KV cache costs the host in a decoding step, beside transformers' own: microseconds a layer.

    python -m bench.runtime.bench_cache [--layers 24] [--out bench/results/cpu-cache-host.json]

Keys and values are so small that their bytes cost nothing. update: one layer stores a token and gives attention what it
may see. before the forward: what the hook asks of the whole cache, over its layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache, Qwen2MoeConfig

from pagedweight.integrations.hf_cache import ArenaCache
from pagedweight.integrations.kv_places import SlabShape
from pagedweight.integrations.kv_pool import KVPool
from pagedweight.runtime.frames import Arena

HEADS, HEAD_DIM = 2, 4
FRAME_BYTES = 1024
PAST_TOKENS, STEPS, ROUNDS = 64, 48, 9


def caches(layers: int) -> dict[str, Callable[[], DynamicCache | ArenaCache]]:
    config = Qwen2MoeConfig(num_hidden_layers=layers)
    shape = SlabShape(HEADS, HEAD_DIM, torch.float32)
    frames = 2 * layers * (2 + (PAST_TOKENS + STEPS) * shape.token_bytes // FRAME_BYTES)
    pool = KVPool(Arena(frames * FRAME_BYTES, FRAME_BYTES), [(shape, shape)] * layers, 16)
    return {"arena": lambda: ArenaCache(pool, config), "dynamic": lambda: DynamicCache(config=config)}


def microseconds(cache: DynamicCache | ArenaCache, layers: int) -> tuple[float, float]:
    """A layer's update, and what comes before a forward over the layers, means of a decoding run."""
    update = before = 0.0
    token = torch.zeros(1, HEADS, 1, HEAD_DIM)
    for layer in range(layers):
        cache.update(*2 * [torch.zeros(1, HEADS, PAST_TOKENS, HEAD_DIM)], layer)
    for _ in range(STEPS):
        began = time.perf_counter()
        if isinstance(cache, ArenaCache):
            cache.missing_frames(1, 1)
            cache.frames_by_sequence(1)
            cache.reserve(1, 1)
        ready = time.perf_counter()
        for layer in range(layers):
            cache.update(token, token, layer)
        update += time.perf_counter() - ready
        before += ready - began
    return 1e6 * update / STEPS / layers, 1e6 * before / STEPS / layers


@torch.no_grad()
def measured(layers: int) -> dict[str, dict[str, float]]:
    """Medians of a few runs of each, which take turns."""
    took: dict[str, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for name, make in caches(layers).items():
            took.setdefault(name, []).append(microseconds(make(), layers))
    middle = {name: [statistics.median(times) for times in zip(*runs, strict=True)] for name, runs in took.items()}
    return {name: {"update_us": update, "before_forward_us": before} for name, (update, before) in middle.items()}


@pytest.mark.parametrize("name", ["arena", "dynamic"])
def bench_a_token_goes_into_every_layer(benchmark, name: str) -> None:
    layers = 2
    benchmark(lambda: microseconds(caches(layers)[name](), layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"device": "CPU", "versions": [torch.__version__, transformers.__version__, sys.version.split()[0]]}
    found |= {"command": " ".join(["python -m bench.runtime.bench_cache", *sys.argv[1:]]), "layers": options.layers}
    found |= measured(options.layers)
    print(json.dumps(found), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
