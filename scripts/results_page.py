"""Write docs/results.md from the JSON files of bench/results: python -m scripts.results_page"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scripts.results_ablations import codebooks, levels
from scripts.results_bars import summary
from scripts.results_evaluation import dynamic, evaluation
from scripts.results_policies import policies
from scripts.results_speed import MODELS, moving, throughput
from scripts.results_tables import Lines, made_by, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results.md"
HEAD = """# Results

Made from `bench/results` by `python -m scripts.results_page`; under each table stands the command that its figures
came from. MB are 10^6 bytes. Quality is of small models trained for this project, speed and memory of true shapes with
random weights: no large pretrained model was at hand.
"""


def shared_experts(record: Mapping[str, Any]) -> Lines:
    """Bytes and KL of paging the shared experts too."""
    yield f"### {record['model']}"
    yield ""
    texts = list(record["rows"][0]["kl"])
    rows = (
        (
            f"{row['paged']}, {row['width']} bits",
            f"{row['paged_bytes'] / 1e6:.2f}",
            f"{row['rest_bytes'] / 1e6:.2f}",
            *(f"{1e3 * np.mean(row['kl'][text]):.3f}" for text in texts),
        )
        for row in record["rows"]
    )
    yield from table(["paged experts", "MB paged", "MB of the rest, fp32", *(f"KL, {text}" for text in texts)], rows)
    yield f"KL to the unquantized model in 10^-3 nats a token, {len(record['rows'][0]['kl'][texts[0]])} windows a text."
    yield ""
    yield from made_by(record, record["machine"]["device"])


def capacity(record: Mapping[str, Any]) -> Lines:
    """What budgets hold of KV cache."""
    yield f"### {MODELS[record.get('model', 'qwen')]} shape, {record['layers']} layers, {record['batch']} sequences"
    yield ""
    for budget, found in record["budgets"].items():
        rows = (
            (
                row["experts"],
                " to ".join(f"{bits:g}" for bits in dict.fromkeys(row.get("bits", ()))),
                f"{row['weight_bytes'] / 1e9:.2f}",
                f"{row['tokens']:,}",
            )
            for row in found
        )
        yield from table(["experts", "bits", "GB at the end", "tokens of KV cache beside them"], rows)
        yield f"One budget of {int(budget) / 1e9:.2f} GB for experts and KV cache."
        yield ""
    yield from made_by(record, record["gpu"])


SPEEDS, COMPILED, MOVED = "h200-throughput-*.json", "h200-compiled-*.json", "h200-moving-*.json"
EVALUATIONS = "evaluation-*.json"
SUMMARY = """What was asked, and what came out; every figure is from the tables below, speed and memory at Qwen1.5-MoE's
shape with byte tables unless said otherwise. Lines in italics are limits: where one is below what is wanted, no kernel
and no table of experts could reach it. Where widths mix, byte tables are the choice from four sequences on: above 4
bits a 16-bit table takes more time than its bytes."""
POLICIES = """More: [planner.md](planner.md), bench/policies.py. As a figure (`python -m bench.frontier_figure`):

![KL to bf16 by mean code bits and policy](frontier.svg)"""
CODEBOOKS = """More: [codebooks.md](codebooks.md); at level "balanced" too:
[bench/results/codebooks.md](../bench/results/codebooks.md)."""
SPEED = """bench/e2e/throughput.py says what a step is. Where its bytes go with one sequence of 2,048 tokens and
Qwen1.5-MoE's shape: attention, shared experts and head are 3.09 GB of bf16, keys and values 0.40 GB, the four routed
experts of each layer 1.66 GB. Were bytes all that counts, routed experts at 3 bits would make a bf16 step 1.36 times
as fast, in no time at all 1.48 times, and with the shared experts at 3 bits too it could be 2.1 times. The paper's
reference is not bound by bytes: 67.1 tokens/s are 14.9 ms a step, and its GPU (960 GB/s) reads these 5.15 GB in 5.4
ms; it waits for the host, as `generate` without graphs does. So bf16 is measured in both forms: every step one CUDA
graph, and as `generate` calls it, with transformers' own choice of experts."""
COMPILED_SPEED = """The same with every decoder layer through torch.compile, in bf16 and ours (`--compiled`): what is
small in a layer (norms, rotary embeddings, routing, activations, additions) is fused in both, so that the experts are
a larger share of the step; bf16's own experts are traced and fused too. vLLM's are kept out of the
compiler, between two compiled parts of each layer; ours are one op within."""
SECTIONS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Lines], str], ...] = (
    ("Policies at the same bytes", "policies-*.json", policies, POLICIES),
    (
        "Residual heads, column energies in their place, and two levels below",
        "ablations-*.json",
        policies,
        "More: [planner.md](planner.md).",
    ),
    ("Quantizer levels", "quality-*.json", levels, "More: [quality.md](quality.md)."),
    ("Codebooks", "codebooks-*bits.json", codebooks, CODEBOOKS),
    (
        "Texts, gold answers and divergence",
        EVALUATIONS,
        evaluation,
        "Any checkpoint: `pagedweight eval --help`.",
    ),
    ("While the KV cache grows", "dynamic-*.json", dynamic, "bench/e2e/dynamic.py."),
    ("Decoding speed and memory", SPEEDS, throughput, SPEED),
    ("Decoding with compiled layers", COMPILED, throughput, COMPILED_SPEED),
    ("Decoding while pages move", MOVED, moving, "With other jobs on the host: [memory.md](memory.md)."),
    ("Shared experts too", "shared-experts-*.json", shared_experts, "How: [transformers.md](transformers.md)."),
    ("Room for KV cache", "h200-capacity-*.json", capacity, "More: [memory.md](memory.md)."),
)


def records_of(*patterns: str) -> list[dict[str, Any]]:
    paths = [path for pattern in patterns for path in sorted(RESULTS.glob(pattern))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def page() -> str:
    lines = [HEAD, "## Summary", "", SUMMARY, ""]
    lines += summary(records_of("policies-*.json"), records_of(SPEEDS, COMPILED, MOVED), records_of(EVALUATIONS))
    for title, pattern, section, note in SECTIONS:
        records = records_of(pattern)
        if records:
            lines += [f"## {title}", "", note, ""]
            lines += [line for record in records for line in section(record)]
    lines += [
        "## Elsewhere",
        "",
        "One layer's time beside other kernels: [kernels.md](kernels.md), [prefill.md](prefill.md). Serving: "
        "[vllm.md](vllm.md).",
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
