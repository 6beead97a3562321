"""Compile what a model's experts run, before engines that start together would each compile the same.

python -m bench.vllm.warm qwen1.5-moe [TOKENS ...]    (one process for each number of tokens in a batch)
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from bench.vllm.shapes import CODEBOOKS, MODELS, WIDTHS, experts_and_intermediate, frame_bytes
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.page_source import DrawnPages
from pagedweight.integrations.vllm.rank_experts import RankExperts
from pagedweight.integrations.vllm.shares import ExpertShare

TOKENS = (8, 16, 32, 64, 1000)  # the graphs' sizes, and a prompt's


def main(model: str, sizes: tuple[int, ...]) -> None:
    running = [subprocess.Popen([sys.executable, __file__, model, str(n), "one"]) for n in sizes]
    if max(process.wait() for process in running):
        raise SystemExit("a size could not be compiled; see above")


def one(model: str, tokens: int) -> None:
    """One layer on a batch, at fixed widths: which widths are committed is not compiled into a kernel."""
    config, device = MODELS[model], torch.device("cuda", 0)
    count, intermediate = experts_and_intermediate(config)
    options = ServingOptions(bits=WIDTHS[0], widths=WIDTHS, codebooks=CODEBOOKS, frame_bytes=frame_bytes(config))
    rank = RankExperts(DrawnPages(options), options, device, TOKENS, lambda: 0)
    rank.add(ExpertShare(0, tuple(range(count)), count, config["hidden_size"], intermediate, "silu"))
    experts = rank.fill(0, None)
    choices = config["num_experts_per_tok"]
    hidden = torch.randn(tokens, config["hidden_size"], dtype=torch.bfloat16, device=device)
    weights, ids = torch.rand(tokens, count, device=device).topk(choices)
    started = time.perf_counter()
    experts(hidden, ids.int(), weights)
    torch.cuda.synchronize()
    print(f"{model}, {tokens} tokens: {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[3:] == ["one"]:
        one(sys.argv[1], int(sys.argv[2]))
    else:
        main(sys.argv[1], tuple(map(int, sys.argv[2:])) or TOKENS)
