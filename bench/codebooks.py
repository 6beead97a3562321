"""KL of a model to itself before quantizing, by codebook and width, with no importance and no calibration.

    python -m bench.codebooks FOLDER_OF_A_MODEL FOLDER_OF_TEXTS --out bench/results/codebooks-tiny-qwen2-moe.json

Dequantized weights are written into the float model, so the figures are the format's own, whatever the kernels.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from bench.quality_parts import WIDTHS, Setup, prepare
from pagedweight.calibration.divergence import diverge
from pagedweight.calibration.substitution import substituted, weights_of
from pagedweight.layout import BlockId, PackedBlock, Projection
from pagedweight.quant.model import quantize_stack

TEXT = "WikiText-2"
BYTES = {2: "lut8", 3: "lut8", 4: "lut8"}
CHOICES = {
    "lut16": dict.fromkeys(WIDTHS, "lut16"),
    "lut8, cubic at 5 and 6": BYTES | {5: "cubic", 6: "cubic"},
    "lut8, affine at 5 and 6": BYTES | {5: "affine", 6: "affine"},
}


def quantized(setup: Setup, codebooks: dict[int, str]) -> dict[BlockId, PackedBlock]:
    return {
        BlockId(experts.shape.layer, expert, projection): packed
        for experts in setup.found
        for projection, weight in zip(Projection, weights_of(experts), strict=True)
        for expert, packed in enumerate(quantize_stack(weight, WIDTHS, codebooks=codebooks))
    }


def measure(setup: Setup) -> dict[str, dict[str, list[float]]]:
    """KL in nats of every window, by choice of codebooks and by width."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, codebooks in CHOICES.items():
        found[name] = {}
        blocks = quantized(setup, codebooks)
        with substituted(setup.found, setup.layout, blocks.__getitem__) as weights:
            for bits in WIDTHS:
                weights.write(np.full(setup.layout.rows, bits))
                kl = diverge(setup.model, setup.references[TEXT]).kl
                found[name][str(bits)] = kl.round(7).tolist()
                print(f"{name}, {bits} bits: {kl.mean():.5f} nats", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    setup = prepare(options.model, options.data, "cpu", options.windows, options.length, 1, rows=4)
    record = {
        "model": options.model.name,
        "text": TEXT,
        "windows": options.windows,
        "tokens": options.length,
        "torch": torch.__version__,
        "kl_nats": measure(setup),
    }
    options.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
