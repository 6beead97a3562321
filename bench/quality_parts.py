"""What bench/quality.py puts together: texts, quantized linear-blocks by method, and weights written into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedweight.bitplane import dequantize, plane_words
from pagedweight.calibration.divergence import Reference, take_reference
from pagedweight.calibration.importance import layer_importance
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.text import Windows, read_documents, token_windows
from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection
from pagedweight.quant.model import quantize_stack

WIDTHS = (2, 3, 4, 5, 6)
# name: (level of the quantizer, whether it is told the calibrated importance)
METHODS = {"fast, importance 1": ("fast", False), "fast": ("fast", True)}
TEXTS = {"WikiText-2": "wikitext2/test.raw.txt", "C4": "c4/validation_2k.jsonl"}
CALIBRATION_TEXT = "calibration/c4_train_sample.txt"


class Setup(NamedTuple):
    """One model under test, in fp32 from its bf16 weights, and its own answers to the held-out windows by text."""

    model: nn.Module
    found: list[ExpertsModule]
    layout: Layout
    calibration: Windows
    references: Mapping[str, Reference]


def prepare(folder: Path, data: Path, device: str, windows: int, length: int, calibration_windows: int) -> Setup:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    found = find_experts(model)

    def cut(path: str, count: int) -> Windows:
        def encode(text: str) -> Sequence[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        # The tokenizer takes seconds for whole files; a token is seldom longer than eight characters.
        documents = [document[: 8 * count * length] for document in read_documents(data / path)]
        return token_windows(documents, encode, length=length, count=count, end_token=tokenizer.eos_token_id)

    references = {name: take_reference(model, cut(path, windows)) for name, path in TEXTS.items()}
    layout = Layout(tuple(experts.shape for experts in found), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
    return Setup(model, found, layout, cut(CALIBRATION_TEXT, calibration_windows), references)


def quantized(setup: Setup, method: str, statistics: Statistics) -> dict[BlockId, PackedBlock]:
    """Every linear-block as a method makes it, on the host."""
    _, calibrated = METHODS[method]
    blocks = {}
    for layer_index, experts in enumerate(setup.found):
        module, shape = experts.module, experts.shape
        importances = layer_importance(statistics, layer_index)
        for projection in Projection:
            weight = (module.gate_up_proj, module.down_proj)[projection].detach()
            stakes = importances[projection].weights() if calibrated else None
            for expert, packed in enumerate(quantize_stack(weight, WIDTHS, importance=stakes)):
                blocks[BlockId(shape.layer, expert, projection)] = packed
    return blocks


class Weights:
    """A model's expert weights, replaced by dequantized ones at will and put back."""

    def __init__(self, setup: Setup, blocks: Mapping[BlockId, PackedBlock]) -> None:
        self._order = list(setup.layout.blocks())
        modules = {experts.shape.layer: experts.module for experts in setup.found}
        self._targets = [
            (modules[b.layer].gate_up_proj, modules[b.layer].down_proj)[b.projection].data[b.expert]
            for b in self._order
        ]
        self._originals = [target.clone() for target in self._targets]
        self._by_width = {
            bits: [dequantize(blocks[b], bits).to(t) for b, t in zip(self._order, self._targets, strict=True)]
            for bits in WIDTHS
        }

    def write(self, bits: Sequence[int]) -> None:
        """bits: a width for every row; 0 for the original weight."""
        for row, (target, width) in enumerate(zip(self._targets, bits, strict=True)):
            target.copy_(self._by_width[width][row] if width else self._originals[row])

    def restore(self) -> None:
        self.write([0] * len(self._targets))


def code_bytes(layout: Layout, bits: np.ndarray) -> int:
    """Bytes of the planes of a plan, (R,) widths, without tables."""
    plane = np.array([4 * n * plane_words(k) for n, k in layout.row_shapes()])
    return int((plane * bits).sum())


def true_bytes(layout: Layout, bits: np.ndarray) -> int:
    """Planes and the committed width's 16-bit tables."""
    tables = np.array([2 * n for n, _ in layout.row_shapes()]) << bits
    return code_bytes(layout, bits) + int(tables.sum())


def random_plans(layout: Layout, count: int, mean_bits: float, seed: int) -> list[np.ndarray]:
    """Plans of independent uniform widths, then moved row by row to within 1 % of equal code bytes."""
    rng = np.random.default_rng(seed)
    target = code_bytes(layout, np.ones(layout.rows, dtype=np.int64)) * mean_bits
    return [_balanced(layout, rng.choice(WIDTHS, layout.rows), target, rng) for _ in range(count)]


def _balanced(layout: Layout, bits: np.ndarray, target: float, rng: np.random.Generator) -> np.ndarray:
    while abs(code_bytes(layout, bits) / target - 1) > 0.01:
        step = 1 if code_bytes(layout, bits) < target else -1
        movable = np.flatnonzero((bits + step >= WIDTHS[0]) & (bits + step <= WIDTHS[-1]))
        bits[rng.choice(movable)] += step
    return bits


def bootstrap(values: np.ndarray, seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean over windows, values (n,); the same resampled windows for every call of equal n."""
    picks = np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))
    return tuple(np.quantile(values[picks].mean(1), [0.025, 0.975]))


def bootstrap_ratio(above: np.ndarray, below: np.ndarray, seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of a ratio of means over the same windows, resampled in pairs."""
    picks = np.random.default_rng(seed).integers(0, len(above), (rounds, len(above)))
    return tuple(np.quantile(above[picks].mean(1) / below[picks].mean(1), [0.025, 0.975]))
