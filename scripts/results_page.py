"""Write docs/results.md from the JSON files of bench/results: python -m scripts.results_page"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.policies_plans import BF16, FULL
from bench.policies_report import sizes, window_kl
from bench.quality_parts import bootstrap_ratio
from scripts.results_ablations import codebooks, levels
from scripts.results_evaluation import dynamic, evaluation
from scripts.results_speed import MODELS, throughput
from scripts.results_tables import Lines, made_by, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results.md"
HEAD = """# Results

Made from `bench/results` by `python -m scripts.results_page`; under each table stands the command that its figures
came from. MB are 10^6 bytes. Quality is of small models trained for this project, speed and memory of true shapes with
random weights: no large pretrained model was at hand.
"""
ABLATIONS = ("w/o routing statistics", "w/o prompt residual", "w/o page movement", "w/o global sensitivity")
OWN = (*ABLATIONS, "buckets alone", "plain greedy", "column energies")


def policies(record: Mapping[str, Any]) -> Lines:
    """Figure 5's comparison and Table 4's ablations on one model."""
    settings, cells = record["settings"], record["cells"]
    budgets = settings["budgets"]
    counted = "planes" if settings["bytes"] == "code" else "planes and tables"
    yield f"### {settings['model']}, level {settings['method']}, budgets in bytes of {counted}"
    yield ""
    others = [name for name in cells if name not in (FULL, BF16, *OWN)]
    for names in (others, [name for name in OWN if name in cells]):
        rows = [(name, *(ratio(cells, name, bits)[0] for bits in budgets)) for name in names]
        full = (FULL, *(f"**{1e3 * window_kl(cells, FULL, bits).mean():.3f}**" for bits in budgets))
        yield from table(["policy", *(f"{bits} bits" for bits in budgets)], [full, *rows])
    windows = len(window_kl(cells, FULL, budgets[0]))
    seen = "its first half, KL is of the second" if settings["signals"] == "past" else "all of it"
    yield (
        "Mean KL to bf16 of the full planner in 10^-3 nats a token; of the others how many times that, with the 95 % "
        f"interval of a bootstrap over the same {windows} windows. Live policies plan each window from {seen}."
    )
    below = [f"{name} at {bits}" for name in cells for bits in budgets if ratio(cells, name, bits)[1] < 1]
    yield (f"Below the full planner's: {', '.join(below)}." if below else "None is below it beyond its interval.")
    yield ""
    if BF16 in cells:
        yield "Expert weights in MB, planes alone / as held with tables and frames:"
        yield ""
        rows = [(name, *sizes(cells, name, budgets)) for name in (FULL, *others)]
        yield from table(["policy", *(f"{bits} bits" for bits in budgets)], rows)
        yield f"In bf16 {next(sizes(cells, BF16, [16.0])).split(' / ')[0]} MB. Two neighbouring widths are held both."
        yield ""
    yield from made_by(record, record["machine"])


def ratio(cells: Mapping[str, Any], name: str, bits: float) -> tuple[str, float]:
    """As the table shows it, and the interval's upper end."""
    if name in (FULL, BF16):
        return "", 1.0
    own, full = window_kl(cells, name, bits), window_kl(cells, FULL, bits)
    if len(own) != len(full):
        return "-", 1.0
    low, high = bootstrap_ratio(own, full)
    return f"{own.mean() / full.mean():.2f} ({low:.2f} to {high:.2f})", high


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


POLICIES = """More: [planner.md](planner.md), bench/policies.py. As a figure (`python -m bench.frontier_figure`):

![KL to bf16 by mean code bits and policy](frontier.svg)"""
SPEED = """bench/e2e/throughput.py says what a step is. Where its bytes go with one sequence of 2,048 tokens and
Qwen1.5-MoE's shape: attention, shared experts and head are 3.09 GB of bf16, keys and values 0.40 GB, the four routed
experts of each layer 1.66 GB. Were bytes all that counts, routed experts at 3 bits would make a bf16 step 1.36 times
as fast, in no time at all 1.48 times, and with the shared experts at 3 bits too it could be 2.1 times. The paper's
reference is not bound by bytes: 67.1 tokens/s are 14.9 ms a step, and its GPU (960 GB/s) reads these 5.15 GB in 5.4
ms; it waits for the host, as `generate` without graphs does. So bf16 is measured in both forms: every step one CUDA
graph, and as `generate` calls it, with transformers' own choice of experts."""
SECTIONS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Lines], str], ...] = (
    ("Policies at the same bytes", "policies-*.json", policies, POLICIES),
    (
        "Residual heads, column energies in their place, and two levels below",
        "ablations-*.json",
        policies,
        "More: [planner.md](planner.md).",
    ),
    ("Quantizer levels", "quality-*.json", levels, "More: [quality.md](quality.md)."),
    ("Codebooks", "codebooks-*bits.json", codebooks, "More: [codebooks.md](codebooks.md)."),
    (
        "Texts, gold answers and divergence",
        "evaluation-*.json",
        evaluation,
        "Any checkpoint: `pagedweight eval --help`.",
    ),
    ("While the KV cache grows", "dynamic-*.json", dynamic, "bench/e2e/dynamic.py."),
    ("Decoding speed and memory", "h200-throughput-*.json", throughput, SPEED),
    ("Shared experts too", "shared-experts-*.json", shared_experts, "How: [transformers.md](transformers.md)."),
    ("Room for KV cache", "h200-capacity-*.json", capacity, "More: [memory.md](memory.md)."),
)


def page() -> str:
    lines = [HEAD]
    for title, pattern, section, note in SECTIONS:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))]
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
