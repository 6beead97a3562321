"""Draws docs/decode-roofline.svg from bench/results/h200-decode.json: time against the byte floor."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"qwen": "o", "mixtral": "s", "gemma": "^"}
COLOURS = {"3": "tab:blue", "4": "tab:orange", "6": "tab:green", "mixed": "tab:red"}


def best_rows() -> list[dict]:
    rows = json.loads((ROOT / "bench/results/h200-decode.json").read_text())["rows"]
    best: dict[tuple, dict] = {}
    for row in rows:
        key = (row["shape"], row["tokens"], row["bits"], row["codebooks"])
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    return [row for row in best.values() if row["shape"] in MARKS and row["codebooks"] == "fast"]


def main() -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4.8))
    for row in best_rows():
        axes.plot(row["floor_us"], row["us"], MARKS[row["shape"]], color=COLOURS[row["bits"]], markersize=6)
    limits = (2.5, 320)
    for share, style in ((1.0, "-"), (0.5, "--"), (0.25, ":")):
        axes.plot(limits, [limit / share for limit in limits], style, color="grey", label=f"{share:.0%} of 4.25 TB/s")
    for shape, mark in MARKS.items():
        axes.plot([], [], mark, color="black", label=shape)
    for bits, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=f"{bits} bits" if bits != "mixed" else "3, 4 and 6 mixed")
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=(5, 500))
    axes.set(xlabel="bytes of planes and tables / 4.25 TB/s (us)", ylabel="time per MoE layer (us)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/decode-roofline.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
