"""Draws docs/decode-roofline from bench/results/h200-decode-rows.json: time against the byte floor, and Marlin."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"qwen": "o", "mixtral": "s", "gemma": "^"}
COLOURS = {"3": "tab:blue", "4": "tab:orange", "6": "tab:green", "mixed": "tab:red"}


def measured_rows() -> list[dict]:
    rows = json.loads((ROOT / "bench/results/h200-decode-rows.json").read_text())["rows"]
    return [row for row in rows if row.get("frames", "framed") == "framed"]


def best_rows(rows: list[dict]) -> list[dict]:
    best: dict[tuple, dict] = {}
    for row in rows:
        if row.get("codebooks") == "fast" and "us" in row:
            key = (row["shape"], row["tokens"], row["bits"], round(row["floor_us"]))
            best[key] = min(best.get(key, row), row, key=lambda one: one["us"])
    return list(best.values())


def main() -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4.8))
    rows = measured_rows()
    for row in best_rows(rows):
        axes.plot(row["floor_us"], row["us"], MARKS[row["shape"]], color=COLOURS[row["bits"]], markersize=6)
    marlin = {
        (row["shape"], row["tokens"], row["experts_met"]): row["us"] for row in rows if "int4" in row.get("peer", "")
    }
    for row in rows:
        key = (row["shape"], row["tokens"], row.get("experts_met"))
        if row.get("bits") == "4" and row.get("codebooks") == "fast" and key in marlin:
            axes.plot(row["floor_us"], marlin[key], "x", color="black", markersize=6)
    limits = (2.5, 320)
    for share, style in ((1.0, "-"), (0.5, "--"), (0.25, ":")):
        axes.plot(limits, [limit / share for limit in limits], style, color="grey", label=f"{share:.0%} of 4.25 TB/s")
    for shape, mark in MARKS.items():
        axes.plot([], [], mark, color="black", label=shape)
    axes.plot([], [], "x", color="black", label="vLLM 0.20.1, Marlin int4")
    for bits, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=f"{bits} bits" if bits != "mixed" else "3, 4 and 6 mixed")
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=(5, 500))
    axes.set(xlabel="bytes of planes and tables / 4.25 TB/s (us)", ylabel="time per MoE layer (us)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/decode-roofline.svg", metadata={"Date": None})
    figure.savefig(ROOT / "docs/decode-roofline.png", dpi=150)


if __name__ == "__main__":
    main()
