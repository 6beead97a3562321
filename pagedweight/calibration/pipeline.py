"""calibrate(): everything that is measured offline, in order, into one Policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from pagedweight.bitplane import plane_words
from pagedweight.calibration.collect import check_method, collect
from pagedweight.calibration.divergence import take_reference
from pagedweight.calibration.gains import measure_gains, with_gains
from pagedweight.calibration.residual import FEWEST_SEQUENCES, Residual, better_residual, fit_residual
from pagedweight.calibration.search import Trial, Trials, search_policy, table_at_parent, trial_count
from pagedweight.calibration.sensitivity import Sensitivity, measure_sensitivity
from pagedweight.calibration.sequences import measure_sequences, observe_sequences
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.stored import load_statistics
from pagedweight.calibration.substitution import Substitution, substituted
from pagedweight.calibration.text import Text, Windows, windows_of
from pagedweight.checkpoint import FOLDER, Checkpoint
from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection, table_bytes
from pagedweight.patching_quantize import moved
from pagedweight.policy import Policy
from pagedweight.saving_source import chosen_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REPORT = "calibration.json"
KEPT_BYTES = 2**30  # of linear-blocks, on the model's device
HEADS = {
    "paper": fit_residual,
    "centered": partial(fit_residual, centered=True),
    "better": better_residual,
}
Progress = Callable[[str, int, int], None]


class Options(NamedTuple):
    """How much to measure. rows: windows per forward. labels: see `collect`.

    method: "gradient", or "forward" where a backward pass does not fit the memory.
    gain_windows, residual_windows, search_windows: windows for each later step, 0 leaves the step out.
    heads: "paper" reads input norms as they are, "centered" from each linear-block's own average; "better" takes the
    one of higher held-out R^2.
    """

    rows: int = 8
    method: str = "gradient"
    labels: str = "sampled"
    gain_windows: int = 8
    residual_windows: int = 64
    search_windows: int = 6
    heads: str = "better"
    seed: int = 0


class Calibration(NamedTuple):
    """A policy and where it came from. gains: (L, 2, W). residual, trials: None and empty where left out.

    energy_share: products that column energies would cost for each routed token, beside those of its expert.
    """

    policy: Policy
    sensitivity: Sensitivity
    gains: np.ndarray
    residual: Residual | None
    trials: list[Trial]
    energy_share: float
    tokens: int
    sequences: int
    skipped: int

    def write(self, folder: str | Path) -> None:
        """policy.safetensors and policy.json, and calibration.json for a reader: coverage, fits, every trial."""
        folder = Path(folder)
        self.policy.save(folder)
        (folder / REPORT).write_text(json.dumps(self.report(), indent=1) + "\n", encoding="utf-8")

    def report(self) -> dict[str, object]:
        fits = {} if self.residual is None else _fits(self.residual, self.policy.widths)
        return {
            "tokens": self.tokens,
            "sequences": self.sequences,
            "skipped_documents": self.skipped,
            "cold": {str(block): count for block, count in self.sensitivity.cold.items()},
            "gains": self.gains.round(4).tolist(),
            "residual_held_out_r2": fits,
            "residual_heads": None if self.residual is None else self.residual.kind,
            "column_energies_share_of_expert_products": self.energy_share,
            "trials": [_plain(trial._asdict()) for trial in self.trials],
        }


def calibrate(
    checkpoint: str | Path,
    data: Text,
    *,
    statistics: Statistics | str | Path | None = None,
    model: PreTrainedModel | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    windows: int = 128,
    length: int = 512,
    device: torch.device | str | None = None,
    options: Options | None = None,
    write: bool = True,
    progress: Progress = lambda step, done, total: None,
) -> Policy:
    """Measure a quantized checkpoint on text and return the planner's policy, written into the checkpoint too.

    data: calibration text: a .jsonl file with a text field or a plain one, several as Paths, or a list of documents.
    tokenizer: the checkpoint's by default. options: what is measured, and how much of it (Options of this module).
    statistics: of the same model, measured before, or the folder they were saved in; taken from data by default.
    windows, length: at most that many windows of that many tokens are used.
    model: the unquantized model, or where it is; by default the checkpoint at its parent width stands in for it.
    device: where a model that is loaded here works; the GPU if there is one. A model in memory stays where it is.
    write: put policy.* and calibration.json beside the pages. progress: called with (step, done, total).
    ValueError, before a model is loaded, when the text will not do or the statistics are of another model.
    """
    opened = Checkpoint.open(checkpoint)
    options = options or Options()
    check_method(options.method, options.labels)
    if options.heads not in HEADS:
        raise ValueError(f"heads is {options.heads!r}; use one of {', '.join(HEADS)}")
    device = model.device if isinstance(model, nn.Module) else chosen_device(device)
    data = windows_of(data, lambda: tokenizer or _tokenizer(checkpoint), length=length, count=windows)
    if isinstance(statistics, str | Path):
        statistics = load_statistics(statistics, device)
    if statistics is not None:
        statistics.check_layers(opened.layout.moe_layers)
    dense = model if isinstance(model, nn.Module) else _dense(checkpoint, model).to(device)

    @lru_cache(KEPT_BYTES // largest_block_bytes(opened.layout))  # each is asked for hundreds of times
    def block(one: BlockId) -> PackedBlock:
        return moved(opened.block(one), device)

    result = calibrate_model(dense, opened.layout, block, data, options, progress, statistics)
    if write:
        result.write(Path(checkpoint) / FOLDER)
    return result.policy


def calibrate_model(
    model: nn.Module,
    layout: Layout,
    block: Callable[[BlockId], PackedBlock],
    windows: Windows,
    options: Options,
    progress: Progress = lambda step, done, total: None,
    statistics: Statistics | None = None,
) -> Calibration:
    """Calibrate a float model against its packed linear-blocks. The model is as it was afterwards.

    ValueError when the model's experts are not the layout's, or nothing could be observed.
    """
    found = find_experts(model)
    if tuple(experts.shape for experts in found) != layout.moe_layers:
        raise ValueError(f"{type(model).__name__} has other experts than the checkpoint; give the model it was made of")
    device = found[0].module.down_proj.device
    statistics = statistics or collect(
        model,
        found,
        windows.batches(options.rows, device),
        method=options.method,
        labels=options.labels,
        seed=options.seed,
        advance=_counter(progress, "statistics", len(windows.tokens)),
    )
    sensitivity = measure_sensitivity(layout, [experts.module for experts in found], statistics, block)
    with substituted(found, layout, block) as substitution:
        gains = _gains(model, windows, layout, sensitivity, substitution, options, progress)
        sensitivity = with_gains(sensitivity, layout, gains)
        policy, residual = sensitivity.policy(layout), None
        if min(options.residual_windows, len(windows.tokens)) >= FEWEST_SEQUENCES:
            few = windows.first(options.residual_windows)
            advance = _counter(progress, "prompt residual", len(few.tokens))
            measured = measure_sequences(
                model, found, few, statistics, layout, block, rows=options.rows, advance=advance
            )
            residual = HEADS[options.heads](measured, layout, seed=options.seed)
            policy = residual.added_to(policy)
        policy, trials = _search(model, found, windows, layout, policy, substitution, options, progress)
    counts = (energy_share(layout), statistics.tokens, statistics.sequences, windows.skipped)
    return Calibration(policy, sensitivity, gains, residual, trials, *counts)


def largest_block_bytes(layout: Layout) -> int:
    """Of planes and all tables."""
    tables = [table_bytes(layout.codebooks[bits], 1, bits) for bits in layout.widths]
    return max(n * (4 * layout.parent_width * plane_words(k) + sum(tables)) for n, k in layout.row_shapes())


def energy_share(layout: Layout) -> float:
    """Products of column energies, K for each linear-block that a token passes, over the N K of its weights."""
    shapes = layout.row_shapes()
    return sum(k for _, k in shapes) / sum(n * k for n, k in shapes)


def _gains(
    model: nn.Module,
    windows: Windows,
    layout: Layout,
    sensitivity: Sensitivity,
    substitution: Substitution,
    options: Options,
    progress: Progress,
) -> np.ndarray:
    steps = (len(layout.moe_layers), len(Projection), len(layout.widths))
    if not options.gain_windows:
        return np.ones(steps)
    reference = take_reference(model, windows.first(options.gain_windows), rows=options.rows)
    advance = _counter(progress, "gains", int(np.prod(steps)))
    return measure_gains(model, reference, layout, sensitivity, substitution, advance)


def _search(
    model: nn.Module,
    found: list[ExpertsModule],
    windows: Windows,
    layout: Layout,
    policy: Policy,
    substitution: Substitution,
    options: Options,
    progress: Progress,
) -> tuple[Policy, list[Trial]]:
    if not options.search_windows:
        return policy, []
    few = windows.first(options.search_windows)
    beginnings = few._replace(mask=few.mask & (torch.arange(few.mask.shape[1]) < few.mask.shape[1] // 2))
    signals = observe_sequences(model, found, beginnings, layout, rows=options.rows)
    trials = Trials(model, few, signals, layout, table_at_parent(layout), substitution)
    return search_policy(policy, trials.score, _counter(progress, "policy search", trial_count(policy)))


def _counter(progress: Progress, step: str, total: int) -> Callable[..., None]:
    done = 0

    def advance(count: int = 1) -> None:
        nonlocal done
        done += count
        progress(step, done, total)

    return advance


def _tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)


def _dense(checkpoint: str | Path, model: str | Path | None) -> PreTrainedModel:
    """The unquantized model, or the checkpoint's own parent-width weights as a dense model."""
    from pagedweight.patching import unpatch
    from pagedweight.saving import load, load_dense

    return unpatch(load(checkpoint)) if model is None else load_dense(model)


def _fits(residual: Residual, widths: tuple[int, ...]) -> dict[str, dict[str, list[float]]]:
    """By projection and transition: [heads' R^2, column energies' R^2]."""
    return {
        projection.label: {
            f"{widths[high]}->{widths[low]}": [
                round(float(r2[projection, high, low]), 4) for r2 in (residual.head_r2, residual.energy_r2)
            ]
            for high in range(1, len(widths))
            for low in range(high)
            if np.isfinite(residual.head_r2[projection, high, low])
        }
        for projection in Projection
    }


def _plain(trial: dict[str, object]) -> dict[str, object]:
    settings = {name: np.asarray(value).tolist() for name, value in trial["settings"].items()}
    return {**trial, "settings": settings, "kl_nats": list(trial["kl_nats"])}
