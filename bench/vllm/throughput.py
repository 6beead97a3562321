"""Requests that arrive until the KV cache is full: completed tokens per second, preemptions, inter-token latency.

One row a process: vLLM's own experts in bf16 or in Marlin's int4, paged experts at a fixed width, or dynamic. All rows
of a budget hold the same bytes for routed experts and KV cache together. `calm` is one batch whose KV fits, where
dynamic widths are all the parent's if the budget has room for both: compare it with the fixed row of that width.
Weights are drawn, so tokens mean nothing; times do. Processes may start together: with --together they wait for each
other, take turns with calm batches, so that all see the same machine, and then with their load.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.vllm import step_times
from bench.vllm.shapes import BLOCK_TOKENS, CODEBOOKS, MODELS, WIDTHS, expert_bytes, frame_bytes, versions, write_folder

GIB = 2**30
GRAPH_SIZES = [8, 16, 32, 64]
# Sixty-four requests grow by four blocks a step: a plan for some sixteen steps at a time.
YIELDING = {"offload_free_blocks": 16, "reload_free_blocks": 64}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen1.5-moe")
    parser.add_argument("--layers", type=int, help="of the model's depth, where memory is too small for all of it")
    parser.add_argument("--row", default="dynamic", help="bf16, marlin, a width, or dynamic")
    parser.add_argument("--budget-gib", type=float, required=True, help="routed experts and KV cache together")
    parser.add_argument("--requests", type=int, default=64, help="0 for the calm batch alone")
    parser.add_argument("--per-second", type=float, default=20.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--calm-requests", type=int, default=8)
    parser.add_argument("--calm-tokens", type=int, default=128)
    parser.add_argument("--calm-batches", type=int, default=6)
    parser.add_argument("--parts", action="store_true", help="of a calm step's time, and kernels' of two more batches")
    parser.add_argument("--most-seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--together", type=Path, help="folder in which rows meet")
    parser.add_argument("--rows", type=int, default=1, help="how many rows meet there")
    parser.add_argument("--wait", type=float, default=20.0, help="most seconds that a row waits there for others")
    parser.add_argument("--after", type=Path, help="a file to wait for before any device memory is taken")
    parser.add_argument("--attention", help="vLLM's attention backend, where its own choice is not installed")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, for machines without a GPU")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    config = dict(MODELS[given.model])
    config["num_hidden_layers"] = given.layers or config["num_hidden_layers"]
    import vllm  # noqa: F401  (takes long, and no device memory)

    while given.after is not None and not given.after.exists():
        time.sleep(0.1)
    started = time.perf_counter()
    llm = serve(given, config)
    ready = time.perf_counter() - started
    meet(given)
    found = measure(llm, given, config)
    found |= {"row": given.row, "budget_gib": given.budget_gib, "seconds_to_ready": round(ready, 1)}
    found |= {"model": given.model, "layers": config["num_hidden_layers"], **versions()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)
    os._exit(0)  # device memory is wanted by the next; nothing else is left to do


def meet(given: argparse.Namespace) -> None:
    """Return once all rows that meet here are ready, or have had time to be."""
    if given.together is None:
        return
    given.together.mkdir(parents=True, exist_ok=True)
    (given.together / f"{given.out.stem}.ready").touch()
    give_up = time.monotonic() + given.wait
    while len(list(given.together.glob("*.ready"))) < given.rows and time.monotonic() < give_up:
        time.sleep(0.1)


@contextlib.contextmanager
def turn(given: argparse.Namespace) -> Iterator[None]:
    """The machine for oneself; a lock goes to who has waited longest, so give others time to ask for it."""
    if given.together is None:
        yield
        return
    time.sleep(0.05)
    with (given.together / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def serve(given: argparse.Namespace, config: dict) -> Any:
    from vllm import LLM

    kind = given.row if given.row in ("bf16", "marlin") else "paged"
    folder = given.out.parent / "folders" / f"{given.out.stem}-{os.getpid()}"
    options: dict[str, Any] = {"widths": WIDTHS, "codebooks": CODEBOOKS, "frame_bytes": frame_bytes(config)}
    if given.row.isdigit():
        options["bits"] = int(given.row)
    else:
        options |= YIELDING
    return LLM(
        str(write_folder(config, folder, kind)),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        block_size=BLOCK_TOKENS if not given.eager else 32,
        kv_cache_memory_bytes=int(given.budget_gib * GIB) - expert_bytes(config, given.row),
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        enforce_eager=given.eager,
        attention_backend=given.attention,
        compilation_config={}
        if given.eager
        else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPH_SIZES},
        additional_config={"pagedweight": options},
    )


def measure(llm: Any, given: argparse.Namespace, config: dict) -> dict[str, Any]:
    """A calm batch, several times after one that warms up, then requests as they arrive."""

    def calm_batch(seed: int) -> tuple[float, dict[str, list[float]]]:
        return drive(llm, given, config, given.calm_requests, 1e9, given.calm_tokens, seed)

    rates, gaps = [], []
    for seed in range(1, given.calm_batches + 2):
        with turn(given):
            seconds, calm = calm_batch(seed)
        rates.append(round(sum(map(len, calm.values())) / seconds, 1))
        gaps.append(latencies(calm)["p50"])
    print(f"calm: {rates} tokens/s, p50 {gaps} ms", flush=True)
    before = facts(llm)
    found = {
        "calm_tokens_per_second": rates[1:],
        "calm_p50_ms": gaps[1:],
        "calm_inter_token_ms": latencies(calm),
        "calm_bits": before["bits"],
        "peak_gib": before["peak_gib"],
        "kv_blocks": before["kv_blocks"],
    }
    if given.parts:
        with turn(given):
            found["step"] = step_times.host_parts(llm, lambda: calm_batch(98))
            found["kernels"] = step_times.kernels(lambda: calm_batch(99), steps=given.calm_tokens)
        print(f"step: {found['step']}", flush=True)
    if not given.requests:
        return found
    with turn(given):
        return found | under_load(llm, given, config, facts(llm))


def under_load(llm: Any, given: argparse.Namespace, config: dict, before: dict[str, Any]) -> dict[str, Any]:
    seconds, arrivals = drive(llm, given, config, given.requests, given.per_second, given.tokens, seed=0)
    after = facts(llm)
    done = [times for times in arrivals.values() if len(times) == given.tokens]
    return {
        "requests": given.requests,
        "completed_requests": len(done),
        "completed_tokens_per_second": round(len(done) * given.tokens / seconds, 1),
        "tokens_per_second": round(sum(map(len, arrivals.values())) / seconds, 1),
        "seconds": round(seconds, 2),
        "inter_token_ms": latencies(arrivals),
        "preemptions": after["preemptions"] - before["preemptions"],
        "weights": after["weights"],
        "lowest_and_last_bits": after["bits"],
        "peak_gib": after["peak_gib"],
    }


def latencies(arrivals: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds between the tokens of a request, over all requests."""
    gaps = 1e3 * np.concatenate([np.diff(times) for times in arrivals.values() if len(times) > 1])
    return {f"p{q}": round(float(np.percentile(gaps, q)), 2) for q in (50, 95, 99)}


def drive(
    llm: Any, given: argparse.Namespace, config: dict, count: int, per_second: float, tokens: int, seed: int
) -> tuple[float, dict[str, list[float]]]:
    """Seconds it took, and when each token of each request came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    sampling.detokenize = False
    random = np.random.default_rng(seed)
    due = np.cumsum(random.exponential(1 / per_second, count))
    prompts = random.integers(2, config["vocab_size"], (count, given.prompt)).tolist()
    waiting = deque(
        (at, f"{seed}-{n}", prompt) for n, (at, prompt) in enumerate(zip(due.tolist(), prompts, strict=True))
    )
    came: dict[str, list[float]] = {name: [] for _, name, _ in waiting}
    engine, start = llm.llm_engine, time.perf_counter()
    while (waiting or engine.has_unfinished_requests()) and time.perf_counter() - start < given.most_seconds:
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            _, name, prompt = waiting.popleft()
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        for output in engine.step():
            at = time.perf_counter() - start
            came[output.request_id] += [at] * len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    engine.abort_request([name for name, times in came.items() if len(times) < tokens])
    return seconds, came


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
