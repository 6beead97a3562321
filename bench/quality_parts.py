"""What bench/quality.py puts together: texts, linear-blocks quantized by method, plans, bytes and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedweight.bitplane import plane_words
from pagedweight.calibration.divergence import Reference, take_reference
from pagedweight.calibration.importance import Importance, layer_importance
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.text import Windows, read_documents, token_windows
from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.layout import BlockId, Layout, PackedBlock
from pagedweight.quant.model import quantize_stack
from pagedweight.quant.refine import refine_stack

WIDTHS = (2, 3, 4, 5, 6)
IMPORTANCE_1 = "fast, importance 1"
# Sweeps of joint coordinate descent after the k-means; None leaves its tables as they are.
METHODS = {IMPORTANCE_1: None, "fast": None, "balanced": 0, "best": 2}
TEXTS = {"WikiText-2": "wikitext2/test.raw.txt", "C4": "c4/validation_2k.jsonl"}
CALIBRATION_TEXT = "calibration/c4_train_sample.txt"


class Setup(NamedTuple):
    """One model under test, in fp32 from its bf16 weights, and its own answers to the held-out windows by text."""

    model: nn.Module
    found: list[ExpertsModule]
    layout: Layout
    calibration: Windows
    references: Mapping[str, Reference]


def prepare(
    folder: Path, data: Path, device: str, windows: int, length: int, calibration_windows: int, rows: int
) -> Setup:
    """rows: windows per forward. Experts run as the plain loop, the one implementation that takes every size."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    model.set_experts_implementation("eager")
    found = find_experts(model)

    def cut(path: str, count: int) -> Windows:
        def encode(text: str) -> Sequence[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        # The tokenizer takes seconds for whole files; a token is seldom longer than eight characters.
        documents = [document[: 8 * count * length] for document in read_documents(data / path)]
        return token_windows(documents, encode, length=length, count=count, end_token=tokenizer.eos_token_id)

    references = {name: take_reference(model, cut(path, windows), rows=rows) for name, path in TEXTS.items()}
    layout = Layout(tuple(experts.shape for experts in found), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
    return Setup(model, found, layout, cut(CALIBRATION_TEXT, calibration_windows), references)


def quantized(setup: Setup, method: str, statistics: Statistics) -> dict[BlockId, PackedBlock]:
    """Every linear-block as a method makes it, on the model's device."""
    return {
        BlockId(experts.shape.layer, expert, importance.projection): packed
        for layer_index, experts in enumerate(setup.found)
        for importance in layer_importance(statistics, layer_index)
        for expert, packed in enumerate(quantized_stack(experts, importance, method))
    }


def quantized_stack(experts: ExpertsModule, importance: Importance, method: str) -> list[PackedBlock]:
    weight = (experts.module.gate_up_proj, experts.module.down_proj)[importance.projection].detach()
    packed = quantize_stack(weight, WIDTHS, importance=None if method == IMPORTANCE_1 else importance.weights())
    if METHODS[method] is None:
        return packed
    moment = torch.stack([importance.second_moment(expert) for expert in range(len(weight))])
    return refine_stack(weight, packed, moment, sweeps=METHODS[method])


def code_bytes(layout: Layout, bits: np.ndarray) -> int:
    """Bytes of the planes of a plan, (R,) widths, without tables."""
    plane = np.array([4 * n * plane_words(k) for n, k in layout.row_shapes()])
    return int((plane * bits).sum())


def true_bytes(layout: Layout, bits: np.ndarray) -> int:
    """Planes and the committed width's 16-bit tables."""
    tables = np.array([2 * n for n, _ in layout.row_shapes()]) << bits
    return code_bytes(layout, bits) + int(tables.sum())


def first_windows(reference: Reference, count: int) -> Reference:
    return reference._replace(windows=reference.windows.first(count), hidden=reference.hidden[:count])


def bootstrap(values: np.ndarray, seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean over windows, values (n,); the same resampled windows for every call of equal n."""
    picks = np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))
    return tuple(np.quantile(values[picks].mean(1), [0.025, 0.975]))


def bootstrap_ratio(above: np.ndarray, below: np.ndarray, seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of a ratio of means over the same windows, resampled in pairs."""
    picks = np.random.default_rng(seed).integers(0, len(above), (rounds, len(above)))
    return tuple(np.quantile(above[picks].mean(1) / below[picks].mean(1), [0.025, 0.975]))
