"""quantize(): a dense model to a folder of pages, at one of three levels."""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from pagedweight.calibration.collect import STATISTICS_WINDOWS, collect, refuse_other_forms
from pagedweight.calibration.sensitivity import warn_of_cold_experts
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.stored import is_whole, load_statistics, save_statistics, statistics_digest
from pagedweight.calibration.text import Text, Windows, windows_of
from pagedweight.calibration.tuning import TuningOptions
from pagedweight.discovery import find_experts
from pagedweight.integrations.hf_register import need_transformers
from pagedweight.layout import normalized_widths
from pagedweight.patching import WIDTHS
from pagedweight.patching_pages import layout_of
from pagedweight.patching_quantize import Importance
from pagedweight.quant.levels import Settings, check_level
from pagedweight.quantizing_tuned import DRAFT, write_tuned
from pagedweight.saving import load_dense
from pagedweight.saving_hub import local_folder
from pagedweight.saving_names import UnknownConversion
from pagedweight.saving_quantize import Job, Progress, write_folder
from pagedweight.saving_source import FolderSource, ModelSource, Source, chosen_device, refuse_dense

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS = 8  # windows per forward of calibration


def quantize(
    model_or_path: nn.Module | str | Path,
    out: str | Path,
    *,
    level: str = "fast",
    widths: Sequence[int] = WIDTHS,
    importance: Importance | None = None,
    seed: int = 0,
    codebooks: Mapping[int, str] | None = None,
    calibration: Statistics | Text | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    windows: int = 1024,
    tuning: TuningOptions | None = None,
    device: torch.device | str | None = None,
    keep_statistics: str | Path | None = None,
    progress: Progress = lambda step, done, total: None,
) -> Path:
    """Quantize a model's routed experts into a folder that load() and from_pretrained() read; returns the folder.

    model_or_path: a model, left as it is, of which transformers' are written whole and others' pages alone; or a folder
        or a name on the Hub, which is read layer by layer and never loaded whole unless calibration is a text. A killed
        run over a folder goes on where it stopped.
    level: "fast", weighted k-means; "balanced", with tables refitted to what calibration saw; "best", with codes moved
        too and, where calibration is a text, tables of 2 to 4 bits tuned on the whole model's answers.
    widths: supported bitwidths, the largest is the parent width.
    importance: by linear-block, tensors that broadcast to its (N, K), h_ij of Eq. (2), instead of calibration's.
    codebooks: by width, how a table of it gives the codes their values, as docs/format.md defines; lut16 where not
        given. Tables stay in that form on the device: the smaller they are, the more room is left for pages.
    calibration: Statistics of this model, or text to take them from: a .jsonl file with a text field or a plain one,
        several as Paths, or documents as a list of strings. Balanced and best need it; fast weighs columns by it.
    windows: of 512 tokens, at most so many; statistics are of the first 256, tables are tuned on all.
    seed: of everything that is drawn. tuning: epochs, rows and rate of tuned tables (calibration.tuning.TuningOptions).
    tokenizer: for text; the folder's own by default. device: where a folder is quantized; the GPU if there is one.
    keep_statistics: a folder for what calibration took from text, to be used again with `load_statistics`.
    progress: called with (step, done, total).
    ValueError when the model cannot be served or a codebook cannot serve its width, before anything is written.
    """
    if isinstance(model_or_path, str | Path) or not isinstance(calibration, Statistics | None):
        need_transformers("pagedweight.quantize of a folder or with a text")
    check_level(level, calibration is not None)
    widths, out = normalized_widths(tuple(widths)), Path(out)
    folder = local_folder(model_or_path) if isinstance(model_or_path, str | Path) else None
    if folder is not None and out.exists() and folder.samefile(out):
        raise ValueError(f"{out} holds the model itself; write to another folder")
    refuse_dense(out)
    device = chosen_device(device)
    if not isinstance(calibration, Statistics | None):
        calibration = windows_of(calibration, lambda: tokenizer or _tokenizer(folder), count=windows)
    source = _source(model_or_path if folder is None else folder, device)
    layout = layout_of([experts.shape for experts in source.found], widths, codebooks)
    settings = Settings(level, layout.widths, layout.codebooks, seed)
    job = Job(source, out, layout, settings, None, importance, _recipe(source, settings, importance), progress)
    if isinstance(calibration, Windows):
        dense = (lambda: model_or_path) if folder is None else (lambda: load_dense(folder).to(device))
        _write_from_text(job, calibration, dense, keep_statistics, tuning or TuningOptions(seed=seed))
    else:
        digest = {} if calibration is None else {"calibration": statistics_digest(calibration)}
        write_folder(_weighed(job._replace(recipe=job.recipe | digest), calibration))
    shutil.rmtree(out / DRAFT, ignore_errors=True)
    return out


def _recipe(source: Source, settings: Settings, importance: Importance | None) -> dict[str, str]:
    recipe = {"level": settings.level, "seed": str(settings.seed)}
    identity = source.identity()
    # What importance a run was given is not known to the one that would go on.
    return recipe if identity is None or importance is not None else recipe | {"source": identity}


def _weighed(job: Job, statistics: Statistics | None) -> Job:
    """The job with errors weighed by calibration."""
    if statistics is None:
        return job
    statistics.check_layers(job.layout.moe_layers)
    warn_of_cold_experts(statistics)
    return job._replace(measured=statistics)


def _write_from_text(
    job: Job,
    text: Windows,
    dense: Callable[[], PreTrainedModel],
    keep_statistics: str | Path | None,
    tuning: TuningOptions,
) -> None:
    """dense: loads the model whole, or gives the one that is loaded."""
    refuse_other_forms(job.source.found)
    job = job._replace(recipe=job.recipe | {"calibration": _digest(text)})
    statistics, model = _calibrated(job, text, dense)
    if keep_statistics is not None:
        save_statistics(statistics, keep_statistics)
    job = _weighed(job, statistics)
    if job.settings.level == "best":
        write_tuned(job, model or dense(), text, tuning)
    else:
        del model
        write_folder(job)


def _calibrated(
    job: Job, windows: Windows, dense: Callable[[], PreTrainedModel]
) -> tuple[Statistics, PreTrainedModel | None]:
    """Statistics of the windows, and the model if it had to be loaded for them.

    A run that may go on keeps them: a GPU's sums differ in their last bits from run to run, and so would codes.
    """
    resumable = "source" in job.recipe
    kept = job.out / DRAFT / f"statistics-{_name_of(job.recipe)}" if resumable else None
    if kept is not None and is_whole(kept):
        return load_statistics(kept), None
    model = dense()
    few = windows.first(STATISTICS_WINDOWS)
    statistics = _statistics(model, few, job.settings.seed, job.progress)
    if kept is not None:
        save_statistics(statistics, kept)
    return statistics, model


def _name_of(recipe: Mapping[str, str]) -> str:
    """Tells what statistics were taken from: the same for every level."""
    parts = (recipe["source"], recipe["calibration"], recipe["seed"])
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _digest(windows: Windows) -> str:
    digest = hashlib.sha256(str(tuple(windows.tokens.shape)).encode())
    digest.update(windows.tokens.numpy().tobytes() + windows.mask.numpy().tobytes())
    return digest.hexdigest()


def _source(model_or_folder: nn.Module | Path, device: torch.device) -> Source:
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

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _statistics(model: PreTrainedModel, windows: Windows, seed: int, progress: Progress) -> Statistics:
    done = 0

    def advance(sequences: int) -> None:
        nonlocal done
        done += sequences
        progress("calibration", done, len(windows.tokens))

    found = find_experts(model)
    return collect(model, found, windows.batches(ROWS, found[0].device), seed=seed, advance=advance)
