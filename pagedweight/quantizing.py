"""quantize(): a dense model to a folder of pages, at one of three levels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagedweight.calibration.collect import collect, refuse_other_forms
from pagedweight.calibration.sensitivity import warn_of_cold_experts
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.stored import save_statistics, statistics_digest
from pagedweight.calibration.text import Text, Windows, windows_of
from pagedweight.calibration.tuning import TuningOptions
from pagedweight.discovery import find_experts
from pagedweight.layout import Layout, normalized_widths
from pagedweight.patching import WIDTHS
from pagedweight.patching_pages import layout_of
from pagedweight.patching_quantize import Importance
from pagedweight.quant.levels import Settings, check_level
from pagedweight.quantizing_tuned import write_tuned
from pagedweight.saving import load_dense
from pagedweight.saving_names import UnknownConversion
from pagedweight.saving_quantize import Job, Progress, write_folder
from pagedweight.saving_source import FolderSource, ModelSource, Source, local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS = 8  # windows per forward of calibration


def quantize(
    model_or_path: PreTrainedModel | str | Path,
    out: str | Path,
    *,
    level: str = "fast",
    widths: Sequence[int] = WIDTHS,
    importance: Importance | None = None,
    seed: int = 0,
    codebooks: Mapping[int, str] | None = None,
    calibration: Statistics | Text | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    windows: int = 256,
    tuning: TuningOptions | None = None,
    device: torch.device | str | None = None,
    keep_statistics: str | Path | None = None,
    progress: Progress = lambda step, done, total: None,
) -> Path:
    """Quantize a model's routed experts into a folder that load() and from_pretrained() read; returns the folder.

    model_or_path: a transformers model, left as it is; or a folder or a name on the Hub, which is read layer by layer
        and never loaded whole unless calibration is a text. A killed run over a folder goes on where it stopped.
    level: "fast", weighted k-means; "balanced", with tables refitted to what calibration saw; "best", with codes moved
        too and, where calibration is a text, tables of 2 to 4 bits tuned on the whole model's answers.
    widths: supported bitwidths, the largest is the parent width.
    importance: by linear-block, tensors that broadcast to its (N, K), h_ij of Eq. (2), instead of calibration's.
    codebooks: by width, how a table of it gives the codes their values, as docs/format.md defines; lut16 where not
        given. Tables stay in that form on the device: the smaller they are, the more room is left for pages.
    calibration: Statistics of this model, or text to take them from, as `windows_of` takes it; at most `windows`
        windows of 512 tokens. Balanced and best need it; fast weighs columns by it.
    tokenizer: for text; the folder's own by default. device: where a folder is quantized; the GPU if there is one.
    keep_statistics: a folder for what calibration took from text, to be used again with `load_statistics`.
    progress: called with (step, done, total).
    ValueError when the model cannot be served or a codebook cannot serve its width, before anything is written.
    """
    check_level(level, calibration is not None)
    widths, out = normalized_widths(tuple(widths)), Path(out)
    folder = local_folder(model_or_path) if isinstance(model_or_path, str | Path) else None
    if folder is not None and out.exists() and folder.samefile(out):
        raise ValueError(f"{out} holds the model itself; write to another folder")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    text = None
    if calibration is not None and not isinstance(calibration, Statistics):
        text = windows_of(calibration, lambda: tokenizer or _tokenizer(folder), count=windows)
    source = _source(model_or_path if folder is None else folder, device)
    layout = layout_of([experts.shape for experts in source.found], widths, codebooks)
    settings = Settings(level, layout.widths, layout.codebooks, seed)
    model = None
    if text is not None:
        refuse_other_forms(source.found)
        model = model_or_path if folder is None else load_dense(folder).to(device)
        calibration = _statistics(model, text, seed, progress)
        if keep_statistics is not None:
            save_statistics(calibration, keep_statistics)
    if calibration is not None:
        _check_statistics(calibration, layout)
        warn_of_cold_experts(calibration)
    recipe = {"level": level, "seed": str(seed)}
    if calibration is not None:
        recipe["calibration"] = statistics_digest(calibration)
    if source.identity() is not None and importance is None:
        recipe["source"] = source.identity()
    job = Job(source, out, layout, settings, calibration, importance, recipe, progress)
    if level == "best" and model is not None:
        write_tuned(job, model, text, tuning or TuningOptions(seed=seed))
    else:
        write_folder(job)
    return out


def _check_statistics(statistics: Statistics, layout: Layout) -> None:
    shapes = tuple(layer.shape for layer in statistics.layers)
    if shapes != layout.moe_layers:
        raise ValueError(f"the statistics are of {len(shapes)} layers of other experts; calibrate this model")


def _source(model_or_folder: PreTrainedModel | Path, device: torch.device) -> Source:
    if not isinstance(model_or_folder, Path):
        return ModelSource(model_or_folder)
    try:
        return FolderSource(model_or_folder, device)
    except UnknownConversion as error:
        warnings.warn(f"{model_or_folder} is loaded whole: {error}", stacklevel=3)
        return ModelSource(load_dense(model_or_folder).to(device))


def _tokenizer(folder: Path | None) -> PreTrainedTokenizerBase:
    if folder is None:
        raise ValueError("calibration text for a model in memory needs its tokenizer; give tokenizer, or windows")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _statistics(model: PreTrainedModel, windows: Windows, seed: int, progress: Progress) -> Statistics:
    done = 0

    def advance(sequences: int) -> None:
        nonlocal done
        done += sequences
        progress("calibration", done, len(windows.tokens))

    found = find_experts(model)
    return collect(model, found, windows.batches(ROWS, found[0].device), seed=seed, advance=advance)
