"""Run in a process of its own: serve tiny models one after another, as a JSON list of runs asks, and print results.

A run: {"model": folder, "llm": arguments of LLM, "rounds": prompts of token ids and how many tokens, in turn}, and
"adapter", a folder with a LoRA adapter, for every round but the first.
With "fault", the last rank fails under the first round, while it moves pages: a copy raises, or kills its process.
The last line printed is RESULT and the JSON list of what each run gave.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from typing import Any

import psutil


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    results = []
    for run in json.loads(sys.stdin.read()):
        small = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "max_num_seqs": 8, "seed": 0}
        llm = LLM(run["model"], **{**small, "max_num_batched_tokens": 256, "disable_log_stats": False, **run["llm"]})
        found = {"tokens": [], "after": []}
        if "fault" in run:
            results.append(fail(llm, run))
            break
        for number, (prompts, tokens) in enumerate(run["rounds"]):
            sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
            asked, adapter = [{"prompt_token_ids": ids} for ids in prompts], None
            if number and "adapter" in run:
                adapter = LoRARequest("adapter", 1, run["adapter"])
            outputs = llm.generate(asked, sampling, use_tqdm=False, lora_request=adapter)
            found["tokens"].append([list(output.outputs[0].token_ids) for output in outputs])
            found["after"].append(facts(llm))
        results.append(found)
        del llm
        gc.collect()
    print("RESULT", json.dumps(results), flush=True)
    os._exit(0)  # an engine that has died has nothing to shut down


def fail(llm: Any, run: dict[str, Any]) -> dict[str, Any]:
    """What became of a round in which the last rank fails, and how long that took to be known."""
    from vllm import SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    ranks = llm.collective_rpc(process_id)
    llm.collective_rpc(break_copies, args=(ranks[-1], run["fault"]))
    prompts, tokens = run["rounds"][0]
    start = time.monotonic()
    try:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=tokens, ignore_eos=True))
    except EngineDeadError as error:
        seconds = time.monotonic() - start
        return {"error": type(error).__name__, "seconds": seconds, "ranks_left": left(ranks, seconds=60)}
    return {"error": None}


def left(processes: list[int], seconds: float) -> int:
    """How many still run after so long."""
    give_up = time.monotonic() + seconds
    running = processes
    while running and time.monotonic() < give_up:
        time.sleep(0.2)
        running = [process for process in running if runs(process)]
    return len(running)


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def process_id(worker: Any) -> int:
    return os.getpid()


def break_copies(worker: Any, process: int, fault: str) -> None:
    """Of one rank, every copy fails from now on."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if fault == "kill":
                os.kill(process, signal.SIGKILL)
            raise RuntimeError("the bus is gone")

    if os.getpid() == process:
        worker.vllm_config.quant_config.rank._pager._copies = Broken()


def facts(llm: object) -> dict[str, object]:
    """What vLLM counts itself, and what paged experts say of themselves: the engine, and each rank."""
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    found = {"preemptions": counted["vllm:num_preemptions"], "prefix_hits": counted["vllm:prefix_cache_hits"]}
    if "pagedweight" in str(llm.llm_engine.vllm_config.model_config.quantization):
        from pagedweight.integrations.vllm.report import report

        found["report"] = report(llm)
        found["why"] = report(llm, (0, 0, "down"))["explanation"]
        found["bits_of_ranks"] = llm.collective_rpc("pagedweight_checked_bits")
    return found


if __name__ == "__main__":
    main()
