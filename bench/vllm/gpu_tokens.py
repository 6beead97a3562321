"""Tokens of the demo model under vLLM on a GPU, with CUDA graphs, row by row, each in a process of its own.

    python -m bench.vllm.gpu_tokens prepare FOLDER
    python -m bench.vllm.gpu_tokens dense4|4|4-eager|4-compiled|4-guessed|4-float|6|roomy|pressed FOLDER [ATTENTION]
    python -m bench.vllm.gpu_tokens 4x2|4x2-float|pressedx2 FOLDER                                (on two GPUs, NCCL)
    python -m bench.vllm.gpu_tokens compare FOLDER

Rows may run all at once. dense4: vLLM's own experts on weights rebuilt from the 4-bit codes, in fp16, which holds them
exactly. compiled: torch.compile, and graphs as vLLM chooses them. guessed: up to three tokens by n-grams, checked in
the same step. float: in fp32, where the order of sums hardly changes a token. roomy: dynamic widths without pressure,
as 6. pressed: dynamic widths while KV blocks run out, then one request alone, under which they return; every few
steps each rank's widths are compared with the engine's and every plane in use with the host's, byte for byte. x2: two
ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from bench.vllm.shapes import versions

REQUESTS, PROMPT, TOKENS, CHECK_STEPS = 16, 32, 160, 40
ROWS = ("dense4", "4", "4-eager", "4-compiled", "4-guessed", "4-float", "6", "roomy", "pressed")
ROWS += ("4x2", "4x2-float", "pressedx2")
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [REQUESTS]}
COMPILED = {"cudagraph_capture_sizes": [REQUESTS]}
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def prepare(folder: Path) -> None:
    """The demo model as it ships, and a float model with its experts as they are at 4 bits."""
    import torch

    import pagedweight
    from pagedweight.bitplane import dequantize
    from pagedweight.checkpoint import Checkpoint
    from pagedweight.discovery import find_experts
    from pagedweight.layout import BlockId, Projection

    source = Path(str(files("pagedweight") / "assets" / "tiny-qwen2-moe"))
    shutil.copytree(source, folder / "paged", dirs_exist_ok=True)
    model = pagedweight.unpatch(pagedweight.load(source, dtype=torch.float16))
    checkpoint = Checkpoint.open(source)
    for experts in find_experts(model):
        layer, here = experts.shape.layer, range(experts.shape.experts)
        for projection, name in zip(Projection, ("gate_up_proj", "down_proj"), strict=True):
            blocks = [checkpoint.block(BlockId(layer, expert, projection)) for expert in here]
            getattr(experts.module, name).data = torch.stack([dequantize(block, 4) for block in blocks]).half()
    # A model of its own: saved as one that was never loaded, each expert under its own names, as vLLM 0.20 reads them.
    fresh = type(model)(model.config).half()
    fresh.load_state_dict(model.state_dict())
    fresh.save_pretrained(folder / "dense4")


def row(name: str, folder: Path, attention: str | None = None) -> None:
    from vllm import LLM, SamplingParams

    ranks, pressed = 2 if "x2" in name else 1, name.startswith("pressed")
    options = {"offload_free_blocks": 4, "reload_free_blocks": 8}
    if name[0].isdigit():
        options["bits"] = int(name[0])
    compilation = {"4-eager": {}, "4-compiled": COMPILED}.get(name, GRAPHS)
    llm = LLM(
        str(folder / ("dense4" if name == "dense4" else "paged")),
        dtype="float32" if name.endswith("float") else "float16",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        # At the least, one size of batch alone has to be compiled.
        max_num_batched_tokens=REQUESTS if pressed or ranks > 1 else 512,
        num_gpu_blocks_override=208 if pressed else 2000,
        kv_cache_memory_bytes=2**28,  # not found out by profiling: several rows may start at once
        gpu_memory_utilization=0.08,
        enforce_eager=name == "4-eager",
        compilation_config=compilation,
        speculative_config=GUESSING if name == "4-guessed" else None,
        disable_log_stats=False,
        attention_backend=attention,
        tensor_parallel_size=ranks,
        disable_custom_all_reduce=True,
        additional_config={"pagedweight": options},
    )
    prompts = np.random.default_rng(0).integers(2, 16000, (REQUESTS, PROMPT)).tolist()
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    found: dict[str, object] = {}
    if pressed:
        found["tokens"], found["checked"] = generate_checked(llm, asked, sampling)
        found["checked"] += generate_checked(llm, asked[:1], sampling)[1]
    else:
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        found["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        if hasattr(llm.llm_engine.engine_core.engine_core.scheduler, "weights"):
            found["checked"] = [checked(llm)]
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    found |= {"preemptions": counted["vllm:num_preemptions"], "ranks": ranks, **versions()}
    (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    print(name, {key: value for key, value in found.items() if key != "tokens"}, flush=True)


def generate_checked(llm: Any, asked: list[dict], sampling: Any) -> tuple[list[list[int]], list[dict[str, object]]]:
    """Tokens of each request, and what was found every few steps on the way and at the end."""
    engine, tokens, checks, steps = llm.llm_engine, {}, [], 0
    for number, prompt in enumerate(asked):
        engine.add_request(str(number), prompt, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        tokens |= {int(output.request_id): list(output.outputs[0].token_ids) for output in outputs if output.finished}
        steps += 1
        if steps % CHECK_STEPS == 0:
            checks.append(checked(llm))
    return [tokens[number] for number in range(len(asked))], [*checks, checked(llm)]


def checked(llm: Any) -> dict[str, object]:
    """Widths and counts of now, once every rank has compared its planes with the host's and its widths with the
    engine's."""
    weights = llm.llm_engine.engine_core.engine_core.scheduler.weights
    expected = weights.planner.tenancy.width.tolist()
    for number, bits in enumerate(llm.collective_rpc("pagedweight_checked_bits")):
        assert bits == expected, f"rank {number} holds other widths than the engine commanded"
    return {
        "mean_bits": float(np.mean(expected)),
        "lowest_mean_bits": weights.lowest_mean_bits,
        **weights.counts._asdict(),
    }


def compare(folder: Path) -> None:
    """Of the rows that have run."""
    ran = [name for name in ROWS if (folder / f"{name}.json").exists()]
    tokens = {name: json.loads((folder / f"{name}.json").read_text())["tokens"] for name in ran}

    def same(one: str, other: str) -> dict[str, object]:
        """Share of requests that are equal to the end, and of tokens before the first that differs."""
        pairs = list(zip(tokens[one], tokens[other], strict=True))
        common = [next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), TOKENS) for a, b in pairs]
        return {"equal_requests": f"{common.count(TOKENS)} of {len(pairs)}", "tokens_before": min(common)}

    pairs = (
        ("4", "dense4"),
        ("4", "4-eager"),
        ("4", "4-compiled"),
        ("4", "4-guessed"),
        ("roomy", "6"),
        ("4", "6"),
        ("4x2", "4"),
        ("4x2-float", "4-float"),
    )
    found = {f"{one} and {other}": same(one, other) for one, other in pairs if {one, other} <= set(ran)}
    (folder / "compared.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2])
    if verb in ROWS:
        row(verb, place, *sys.argv[3:])
    else:
        {"prepare": prepare, "compare": compare}[verb](place)
