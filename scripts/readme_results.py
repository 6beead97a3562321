"""Rewrite the README's GPU results from bench/results: python scripts/readme_results.py"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PARTS = ("gains", "layer")  # between <!-- gains: begin --> and <!-- gains: end -->, and likewise
SHAPE = "qwen"
DECODED, PREFILLED = (1, 4, 16, 64), (512, 2048)
WIDTHS = ("3", "4", "6", "mixed")
CASES = ((1, 3), (4, 4))  # the paper's: sequences and bits


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def fastest(rows: list[dict], codebooks: str = "fast") -> dict[tuple[int, str], float]:
    """Microseconds by tokens and by width or peer, of the fastest setting."""
    times: dict[tuple[int, str], float] = {}
    for row in rows:
        if row["shape"] == SHAPE and row.get("codebooks", codebooks) == codebooks:
            key = (row["tokens"], row.get("peer") or row.get("bits") or row["config"])
            times[key] = min(row["us"], times.get(key, row["us"]))
    return times


def table(decode: dict, prefill: dict) -> str:
    """Microseconds of one MoE layer by tokens and width, beside vLLM's kernels of the same runs, as markdown."""
    rows = decode["rows"] + prefill["records"] + prefill["peers"]
    times, default = fastest(rows), fastest(rows, "lut16")
    lines = [
        "| tokens | vLLM bf16 | Marlin int4 | 3 bits | 4 bits | 6 bits | 3, 4 and 6 mixed |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tokens in (*DECODED, *PREFILLED):
        cells = [times.get((tokens, column)) for column in ("vllm bf16", "vllm marlin int4", *WIDTHS)]
        lines.append(f"| {tokens} | " + " | ".join("-" if us is None else f"{us:.1f}" for us in cells) + " |")
    worst = max(row["error"] for row in rows if row["shape"] == SHAPE and "bits" in row)
    lines += [
        "",
        f"Microseconds of one MoE layer of Qwen1.5-MoE-A2.7B on one {decode['gpu']}, bf16, torch {decode['torch']}, "
        f"triton {decode['triton']}, vLLM {decode['vllm']}; medians of CUDA-graph replays over weights that are not in "
        "L2. Byte tables up to 4 bits, lines at 6. Largest relative error against fp64 of the format's own values: "
        f"{worst:.1e}.",
        "",
        "Models have 16-bit tables (`lut16`) unless told otherwise: they keep more quality and take longer, "
        f"{default[16, '3']:.1f}, {default[16, '4']:.1f} and {default[16, '6']:.1f} us for 16 tokens at 3, 4 and 6 "
        "bits.",
    ]
    return "\n".join(lines) + "\n"


def gain(decoded: dict, batch: int, width: int, against: str = "HF grouped_mm") -> tuple[float, float]:
    """How many times bf16's tokens a second, and the per cent of memory saved."""
    bars = [bar for bar in decoded["bars"] if bar["against"] == against]
    bar = next(bar for bar in bars if (bar["batch"], bar["width"]) == (batch, width))
    return bar["times_tokens_per_second"], 100 * bar["memory_saved"]


def decoding(records: list[dict], compiled: list[dict]) -> str:
    """The paper's two cases, each with the routed experts paged and with the shared ones too."""
    graphs, fused = (
        [figure for of in them for place in CASES for figure in gain(of, *place)] for them in (records, compiled)
    )
    beside_vllm = [gain(of, *place, "vLLM fused_experts")[0] for of in records for place in CASES]
    return (
        "- Decoding beside bf16 (`grouped_mm`), every step one CUDA graph: one sequence at 3 bits makes "
        "{:.2f} times the tokens a second in {:.1f} % less memory, four at 4 bits {:.2f} times in {:.1f} % less; with "
        "the shared experts paged too, {:.2f} times in {:.1f} % less and {:.2f} times in {:.1f} % less. ".format(
            *graphs
        )
        + "With every layer through torch.compile in both, {:.2f} and {:.2f} times, and {:.2f} and {:.2f}. ".format(
            *fused[::2]
        )
        + "Beside vLLM's bf16 experts, in graphs, {:.2f} and {:.2f} times, and {:.2f} and {:.2f}.".format(*beside_vllm)
    )


def models(decoded: list[dict], compiled: list[dict], pressed: dict, served: dict) -> str:
    """What Qwen1.5-MoE's whole shape gains: decoding, under pressure, and in vLLM, as a list of markdown.

    decoded, compiled: without and with the shared experts paged.
    """
    moving = pressed["moving"]
    full, lowest, _, restored = moving["bits"]
    rows = {row["row"]: row for row in served["rows"] if row["model"] == "qwen1.5-moe"}
    low, fixed, dynamic = rows["3"], rows["6"], rows["dynamic"]
    released, fills = moving["released_share_in_kv_blocks"], pressed["budget_bytes"] / 1e9
    calm = [median(row["calm_tokens_per_second"]) for row in (dynamic, fixed)]
    lines = [
        decoding(decoded, compiled),
        f"- Under pressure, {moving['batch']} sequences in {fills:.2f} GB: {full:.0f} bits fall to {lowest:.0f} as the "
        f"KV cache fills, {100 * released:.2f} % of the bytes released become KV blocks, and {restored:.0f} bits are "
        "back after the end.",
        f"- In vLLM, {dynamic['requests']} requests in {dynamic['budget_gib']:.0f} GiB for experts and KV cache: "
        f"dynamic widths complete {dynamic['completed_tokens_per_second']:,.0f} tokens a second with "
        f"{dynamic['preemptions']} preemptions, fixed 6 bits {fixed['completed_tokens_per_second']:,.0f} with "
        f"{fixed['preemptions']}, fixed 3 bits {low['completed_tokens_per_second']:,.0f} with {low['preemptions']}. "
        f"With nothing to make room for: dynamic widths {calm[0]:,.0f}, fixed 6 bits {calm[1]:,.0f}.",
        "",
        f"All at Qwen1.5-MoE-A2.7B's shapes with random weights, on one {decoded[0]['gpu']}.",
    ]
    return "\n".join(lines) + "\n"


def rewritten(readme: str) -> str:
    """The README with what is between its marks replaced."""
    decoded = [record(f"h200-throughput-qwen-{paged}") for paged in ("fast", "shared")]
    compiled = [record(name) for name in ("h200-compiled-qwen", "h200-compiled-qwen-shared")]
    gains = models(decoded, compiled, record("h200-pressure-qwen"), record("h200-vllm"))
    layer = table(record("h200-decode-rows"), record("h200-prefill"))
    for part, made in zip(PARTS, (gains, layer), strict=True):
        begin, end = f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->\n"
        head, rest = readme.split(begin)
        readme = f"{head}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    return readme


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
