"""What the quality benches share: a trained model and its texts, linear-blocks by method, bytes and intervals."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedweight.bitplane import plane_words
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.text import Windows, in_turn, read_documents, token_windows
from pagedweight.calibration.tuning import tune_tables
from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.evaluation import record
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection
from pagedweight.quant.levels import Settings, quantize_experts

WIDTHS = (2, 3, 4, 5, 6)
IMPORTANCE_1 = "fast, importance 1"
# Level, whether calibration's statistics are used, and whether tables then follow the whole model's divergence.
METHODS = {
    IMPORTANCE_1: ("fast", False, False),
    "fast": ("fast", True, False),
    "balanced": ("balanced", True, False),
    "best, tables not tuned": ("best", True, False),
    "best": ("best", True, True),
}
ROUNDING_NATS = 1e-6  # of KL, which fp32 logits leave: nothing is a multiple of that
CHARACTERS_PER_TOKEN = 8  # a token is seldom longer, and tokenizers take seconds for whole files


class Trained(NamedTuple):
    """A model in fp32 from its own weights, windows of calibration text, and held-out windows by text."""

    name: str
    model: nn.Module
    found: list[ExpertsModule]
    layout: Layout
    calibration: Windows
    texts: Mapping[str, Windows]

    @property
    def device(self) -> torch.device:
        return self.found[0].module.down_proj.device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every quality bench is told."""
    parser.add_argument("models", nargs="+", type=Path, help="folders of Hugging Face MoE models")
    parser.add_argument(
        "--calibration", type=Path, nargs="+", required=True, help="texts to calibrate on, a window of each in turn"
    )
    parser.add_argument(
        "--text",
        action="append",
        required=True,
        metavar="NAME=FILE",
        type=_named_file,
        help="held-out text or .jsonl file, under the name that tables show; give it again for more",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--keep", type=Path, help="folder where calibration and linear-blocks are kept for another run")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows per text")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--calibration-windows", type=int, default=256)
    parser.add_argument("--rows", type=int, help="windows per forward; by default 8 on the CPU, 64 on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def _named_file(argument: str) -> tuple[str, Path]:
    name, separator, path = argument.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{argument!r} has no name; write NAME=FILE")
    return name, Path(path)


def load(folder: Path, arguments: argparse.Namespace) -> Trained:
    """The model and its texts. Experts run as the plain loop, the one implementation that takes every size."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def cut(path: Path, count: int) -> Windows:
        def encode(text: str) -> Sequence[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        longest = CHARACTERS_PER_TOKEN * count * arguments.length
        documents = [document[:longest] for document in read_documents(path)]
        return token_windows(documents, encode, length=arguments.length, count=count, end_token=tokenizer.eos_token_id)

    given = [cut(path, arguments.calibration_windows) for path in arguments.calibration]
    calibration = in_turn(given, arguments.calibration_windows)
    texts = {name: cut(path, arguments.windows) for name, path in arguments.text}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(arguments.device).eval()
    model.set_experts_implementation("eager")
    found = find_experts(model)
    layout = Layout(tuple(experts.shape for experts in found), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
    return Trained(folder.name, model, found, layout, calibration, texts)


def rows_per_forward(arguments: argparse.Namespace) -> int:
    return arguments.rows or (64 if arguments.device.startswith("cuda") else 8)


def settings_of(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """What a record's measurements depend on; others are not put beside them."""
    return {
        "model": folder.name,
        "texts": [name for name, _ in arguments.text],
        "windows": arguments.windows,
        "tokens": arguments.length,
        "calibration": [path.stem for path in arguments.calibration],
        "calibration_windows": arguments.calibration_windows,
    }


def command(module: str) -> str:
    """The command of this run, without the folders of absolute paths."""
    return record.command(f"python -m {module}")


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"


def quantized(
    trained: Trained, method: str, statistics: Statistics, codebooks: Mapping[int, str] | None = None
) -> dict[BlockId, PackedBlock]:
    """Every linear-block as a method makes it, on the model's device. codebooks: the layout's by default."""
    level, calibrated, tuned = METHODS[method]
    codebooks = codebooks or trained.layout.codebooks
    settings = Settings(level, tuple(codebooks), codebooks)
    blocks = {}
    for index, experts in enumerate(trained.found):
        for projection in Projection:
            weight = (experts.module.gate_up_proj, experts.module.down_proj)[projection].detach()
            stakes = statistics.importance(index)[projection] if calibrated else None
            for expert, packed in enumerate(quantize_experts(weight, settings, stakes)):
                blocks[BlockId(experts.shape.layer, expert, projection)] = packed
    return _tuned(trained, blocks) if tuned else blocks


def _tuned(trained: Trained, blocks: Mapping[BlockId, PackedBlock]) -> dict[BlockId, PackedBlock]:
    tables = tune_tables(trained.model, trained.found, trained.layout, blocks.__getitem__, trained.calibration)
    moved = {block: {b: own[block].to(trained.device) for b, own in tables.items()} for block in blocks}
    return {block: packed._replace(tables=packed.tables | moved[block]) for block, packed in blocks.items()}


def code_bytes(layout: Layout, bits: np.ndarray) -> int:
    """Bytes of the planes of a plan, (R,) widths, without tables."""
    plane = np.array([4 * n * plane_words(k) for n, k in layout.row_shapes()])
    return int((plane * bits).sum())


def true_bytes(layout: Layout, bits: np.ndarray) -> int:
    """Planes and the committed width's 16-bit tables."""
    tables = np.array([2 * n for n, _ in layout.row_shapes()]) << bits
    return code_bytes(layout, bits) + int(tables.sum())


def rounded(values: np.ndarray) -> list[float]:
    """Six significant digits: what a JSON of many windows need hold."""
    return [float(f"{x:.6g}") for x in values]


def bootstrap(values: np.ndarray, seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean over windows, values (n,); the same resampled windows for every call of equal n."""
    picks = np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))
    return tuple(np.quantile(values[picks].mean(1), [0.025, 0.975]))


def bootstrap_ratio(above: np.ndarray, below: np.ndarray, seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of a ratio of means over the same windows, resampled in pairs."""
    picks = np.random.default_rng(seed).integers(0, len(above), (rounds, len(above)))
    return tuple(np.quantile(above[picks].mean(1) / below[picks].mean(1), [0.025, 0.975]))
