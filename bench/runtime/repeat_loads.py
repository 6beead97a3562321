"""The first loads of a checkpoint's pages, again and again in processes that share a GPU, and whether one ever fails.

    python -m bench.runtime.repeat_loads CHECKPOINT --processes 8 --seconds 60 \\
        --out bench/results/h200-repeated-loads.json

A process loads the checkpoint into an arena of its own, brings every row to one width after the other, each from the
floor, answers at each, and begins anew. An answer must be that width's first, bit for bit. --under: what stands before
python, such as "compute-sanitizer --tool memcheck".
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from pagedweight import RuntimeConfig
from pagedweight.evaluation.record import command
from pagedweight.saving import load

WIDTHS = (3, 4, 5, 6, 2, 3)
ARENA_BYTES = 2**30


def repeat(checkpoint: Path, seconds: float, *, batched: bool) -> dict:
    """One process: how often it loaded and set widths, and how many answers were others than before."""
    config = RuntimeConfig(budget_bytes=ARENA_BYTES, deterministic=True, batched_copies=batched)
    ids, answers = torch.arange(64, device="cuda").view(1, -1), {}
    loads = widths_set = differing = 0
    began = time.monotonic()
    while not loads or time.monotonic() - began < seconds:
        model = load(checkpoint, config=config, verify=False, device_map="cuda", dtype="float32").eval()
        loads += 1
        for width in WIDTHS:
            with model.pagedweight.held_at(width), torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits
            differing += not torch.equal(answers.setdefault(width, logits), logits)
            widths_set += 1
        model.pagedweight.check()
        model.pagedweight.close()
        del model
    return {"loads": loads, "widths_set": widths_set, "answers_that_differ": differing, "batched_copies": batched}


def start(checkpoint: Path, seconds: float, under: str, *, batched: bool) -> subprocess.Popen:
    arguments = [str(checkpoint), "--seconds", str(seconds), "--worker", *([] if batched else ["--single-copies"])]
    line = [*shlex.split(under), sys.executable, "-X", "faulthandler", "-m", "bench.runtime.repeat_loads", *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcome(process: subprocess.Popen) -> dict:
    output, _ = process.communicate()
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"loads"')]
    lines = output.splitlines()[-3:] if process.returncode or "ERROR SUMMARY" in output else []
    return {"exit_code": process.returncode, **(found[0] if found else {}), "last_lines": lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--under", default="")
    parser.add_argument("--single-copies", action="store_true", help="as RuntimeConfig(batched_copies=False)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batched = not options.single_copies
    if options.worker:
        print(json.dumps(repeat(options.checkpoint, options.seconds, batched=batched)), flush=True)
        return 0
    given = options.checkpoint, options.seconds, options.under
    runs = [outcome(one) for one in [start(*given, batched=batched) for _ in range(options.processes)]]
    results = {
        "gpu": torch.cuda.get_device_name(),
        "versions": [torch.__version__, transformers.__version__, driver_version()],
        "command": command("python -m bench.runtime.repeat_loads"),
        "runs": runs,
    }
    print(json.dumps(results, indent=1), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(run["exit_code"] or run.get("answers_that_differ") for run in runs))


def driver_version() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return "driver " + subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]


if __name__ == "__main__":
    sys.exit(main())
