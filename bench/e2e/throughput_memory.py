"""What the allocator holds: a row's peak, and where it comes from."""

from __future__ import annotations

import gc

import torch


def fresh_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that there ever was
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved() if device.type == "cuda" else 0


def memory_by_pool(device: torch.device) -> list[dict]:
    """Bytes reserved and allocated in each of the allocator's pools: a stream's, and those of graphs."""
    pools: dict[tuple, dict] = {}
    for segment in torch.cuda.memory_snapshot() if device.type == "cuda" else []:
        graphs = tuple(segment["segment_pool_id"]) != (0, 0)
        key = segment["stream"], graphs, segment["segment_type"]
        empty = {"stream": segment["stream"], "of_a_graph": graphs, "blocks": segment["segment_type"]}
        pool = pools.setdefault(key, empty | {"reserved": 0, "allocated": 0})
        pool["reserved"] += segment["total_size"]
        pool["allocated"] += segment["allocated_size"]
    return list(pools.values())
