"""What it costs to move frames between KV blocks, and to load them: microseconds and GB/s on this GPU.

python -m bench.vllm.frame_copies OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from pagedweight.integrations.vllm.frame_copies import PageLoad
from pagedweight.integrations.vllm.frame_copies_cuda import CudaFrameCopies

FRAME_BYTES, FRAMES_PER_BLOCK, PAGE_FRAMES = 64 * 1024, 48, 11  # Qwen1.5-MoE, blocks of 16 tokens
REPEATS = 50


def main(out: Path) -> None:
    device = torch.device("cuda", 0)
    copies = CudaFrameCopies(FRAME_BYTES, device)
    memory = torch.randint(0, 256, (4096, FRAME_BYTES), dtype=torch.uint8, device=device)
    spots = memory.data_ptr() + np.random.default_rng(0).permutation(4096).astype(np.int64) * FRAME_BYTES
    found = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    for blocks in (1, 4, 16):
        count = blocks * FRAMES_PER_BLOCK
        source, target = spots[:count], spots[2048 : 2048 + count]
        copies.move(source, target)
        assert np.array_equal(copies.read(source).numpy(), copies.read(target).numpy())
        device_us, host_us = timed(lambda source=source, target=target: copies.move(source, target))
        gb_per_s = 2 * count * FRAME_BYTES / device_us / 1e3
        found[f"move {blocks} blocks"] = figures(device_us, host_us, gb_per_s)
    host = torch.randint(0, 256, (256, PAGE_FRAMES * FRAME_BYTES), dtype=torch.uint8).pin_memory()
    for pages in (4, 17, 70):
        loads = [PageLoad(host[n], spots[n * PAGE_FRAMES : (n + 1) * PAGE_FRAMES]) for n in range(pages)]

        def load(loads: list[PageLoad] = loads) -> None:
            copies.load(loads)
            copies.join()

        load()
        assert torch.equal(copies.read(loads[-1].address), loads[-1].host)
        device_us, host_us = timed(load)
        gb_per_s = pages * PAGE_FRAMES * FRAME_BYTES / device_us / 1e3
        found[f"load {pages} planes"] = figures(device_us, host_us, gb_per_s)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)


def timed(call: object) -> tuple[float, float]:
    """Microseconds of one call: on the device, from launch to the end, and on the host until it returns."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun = time.perf_counter()
        start.record()
        call()
        end.record()
        host = 1e6 * (time.perf_counter() - begun)
        torch.cuda.synchronize()
        times.append((1e3 * start.elapsed_time(end), host))
    return tuple(np.median(times, axis=0).tolist())


def figures(device_us: float, host_us: float, gb_per_s: float) -> dict[str, float]:
    return {"device_us": round(device_us, 1), "host_us": round(host_us, 1), "gb_per_s": round(gb_per_s, 1)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
