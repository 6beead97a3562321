"""Run in a process of its own: serve tiny models one after another, as a JSON list of runs asks, and print results.

A run: {"model": folder, "llm": arguments of LLM, "prompts": token ids, "tokens": how many, "probe": also a report}.
The last line printed is RESULT and the JSON list of what each run gave.
"""

from __future__ import annotations

import gc
import json
import sys


def facts(llm: object) -> dict[str, object]:
    """What vLLM counts itself, and what paged experts say of themselves."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    counted = {"preemptions": found.get("vllm:num_preemptions")}
    core = llm.llm_engine.engine_core
    weights = getattr(getattr(getattr(core, "engine_core", None), "scheduler", None), "weights", None)
    if weights is not None:
        counted["counts"] = weights.counts._asdict()
        counted["mean_bits"] = float(weights.planner.tenancy.width.mean())
    return counted


def main() -> None:
    from vllm import LLM, SamplingParams

    results = []
    for run in json.loads(sys.stdin.read()):
        small = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "max_num_seqs": 8, "seed": 0}
        llm = LLM(run["model"], **{**small, "max_num_batched_tokens": 256, "disable_log_stats": False, **run["llm"]})
        sampling = SamplingParams(max_tokens=run["tokens"], temperature=0, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in run["prompts"]], sampling, use_tqdm=False)
        results.append({"tokens": [list(output.outputs[0].token_ids) for output in outputs], **facts(llm)})
        del llm
        gc.collect()
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
