"""Requests that arrive until the KV cache is full: completed tokens per second, preemptions, inter-token latency.

One row a process: bf16 experts of vLLM, paged experts at a fixed width, or dynamic. All rows of a budget hold the same
bytes for routed experts and KV cache together. `calm` is eight requests at once, without pressure. Weights are drawn,
so tokens mean nothing; times do. Processes may start together: with --lock they measure one after another.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from bench.vllm.shapes import BLOCK_TOKENS, CODEBOOKS, MODELS, WIDTHS, expert_bytes, frame_bytes, write_folder

GIB = 2**30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen1.5-moe")
    parser.add_argument("--row", default="dynamic", help="bf16, a width, or dynamic")
    parser.add_argument("--budget-gib", type=float, required=True, help="routed experts and KV cache together")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--per-second", type=float, default=20.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--most-seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--attention", help="vLLM's attention backend, where its own choice is not installed")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, for machines without a GPU")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    started = time.perf_counter()
    llm = serve(given)
    ready = time.perf_counter() - started
    if given.lock is None:
        found = measure(llm, given)
    else:
        with given.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = measure(llm, given)
    found |= {
        "model": given.model,
        "row": given.row,
        "budget_gib": given.budget_gib,
        "seconds_to_ready": round(ready, 1),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)


def serve(given: argparse.Namespace) -> Any:
    from vllm import LLM

    config = MODELS[given.model]
    folder = given.out.parent / "folders" / f"{given.model}-{'float' if given.row == 'bf16' else 'paged'}-{os.getpid()}"
    options: dict[str, Any] = {"widths": WIDTHS, "codebooks": CODEBOOKS, "frame_bytes": frame_bytes(config)}
    if given.row not in ("bf16", "dynamic"):
        options["bits"] = int(given.row)
    kv_bytes = int(given.budget_gib * GIB) - expert_bytes(config, given.row)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    return LLM(
        str(write_folder(config, folder, paged=given.row != "bf16")),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        block_size=BLOCK_TOKENS if not given.eager else 32,
        kv_cache_memory_bytes=kv_bytes,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        enforce_eager=given.eager,
        attention_backend=given.attention,
        compilation_config={}
        if given.eager
        else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
        additional_config={"pagedweight": options},
    )


def measure(llm: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests as they arrive, after a few that warm up."""
    drive(llm, given, count=4, per_second=1e9, tokens=8, most_seconds=30, seed=1)
    _, calm = drive(llm, given, count=8, per_second=1e9, tokens=96, most_seconds=30, seed=2)
    before = facts(llm)
    seconds, arrivals = drive(llm, given, given.requests, given.per_second, given.tokens, given.most_seconds, seed=0)
    after = facts(llm)
    done = [times for times in arrivals.values() if len(times) == given.tokens]
    return {
        "completed_requests": len(done),
        "completed_tokens_per_second": round(len(done) * given.tokens / seconds, 1),
        "seconds": round(seconds, 2),
        "inter_token_ms": latencies(arrivals),
        "calm_inter_token_ms": latencies(calm),
        "calm_bits": before["bits"],
        "preemptions": after["preemptions"] - before["preemptions"],
        "weights": after["weights"],
        "kv_blocks": after["kv_blocks"],
        "lowest_bits": min(after["bits"], default=None),
        "mean_bits_at_end": after["bits"][-1] if after["bits"] else None,
        "peak_gib": after["peak_gib"],
    }


def latencies(arrivals: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds between the tokens of a request, over all requests."""
    gaps = 1e3 * np.concatenate([np.diff(times) for times in arrivals.values() if len(times) > 1])
    return {f"p{q}": round(float(np.percentile(gaps, q)), 2) for q in (50, 95, 99)}


def drive(
    llm: Any, given: argparse.Namespace, count: int, per_second: float, tokens: int, most_seconds: float, seed: int
) -> tuple[float, dict[str, list[float]]]:
    """Seconds it took, and when each token of each request came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    sampling.detokenize = False
    random = np.random.default_rng(seed)
    due = np.cumsum(random.exponential(1 / per_second, count))
    prompts = random.integers(2, MODELS[given.model]["vocab_size"], (count, given.prompt)).tolist()
    waiting = deque(
        (at, f"{seed}-{n}", prompt) for n, (at, prompt) in enumerate(zip(due.tolist(), prompts, strict=True))
    )
    came: dict[str, list[float]] = {name: [] for _, name, _ in waiting}
    engine, start = llm.llm_engine, time.perf_counter()
    while (waiting or engine.has_unfinished_requests()) and time.perf_counter() - start < most_seconds:
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            _, name, prompt = waiting.popleft()
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        for output in engine.step():
            at = time.perf_counter() - start
            came[output.request_id] += [at] * len(output.outputs[0].token_ids)
    unfinished = [name for name, times in came.items() if len(times) < tokens]
    engine.abort_request(unfinished)
    return time.perf_counter() - start, came


def facts(llm: Any) -> dict[str, Any]:
    import torch

    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    weights = getattr(scheduler, "weights", None)
    peak = torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else None
    return {
        "preemptions": counted["vllm:num_preemptions"],
        "weights": weights.counts._asdict() if weights else None,
        "bits": [weights.lowest_mean_bits, float(weights.planner.tenancy.width.mean())] if weights else [],
        "kv_blocks": scheduler.cache_config.num_gpu_blocks,
        "peak_gib": peak and round(peak, 2),
    }


if __name__ == "__main__":
    main()
