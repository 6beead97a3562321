"""quantize(): a dense model to a folder of pages, at one of three levels."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagedweight.calibration.collect import collect
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.stored import statistics_digest
from pagedweight.calibration.text import Text, Windows, windows_of
from pagedweight.calibration.tuning import TuningOptions, tune_tables, tuned_widths, tuning_steps
from pagedweight.checkpoint import FOLDER, METADATA, Checkpoint
from pagedweight.checkpoint_shard import sync_and_rename
from pagedweight.discovery import find_experts
from pagedweight.layout import BlockId, normalized_widths
from pagedweight.patching import WIDTHS
from pagedweight.patching_pages import layout_of
from pagedweight.patching_quantize import Importance
from pagedweight.quant.levels import Settings, check_level
from pagedweight.saving import load_dense
from pagedweight.saving_names import UnknownConversion
from pagedweight.saving_quantize import Job, Progress, finish_folder, write_folder, write_pages
from pagedweight.saving_source import FolderSource, ModelSource, Source, local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DRAFT = "pagedweight-draft"  # codes of an unfinished run at level best, whose tables are still to be tuned
TUNED = "tuned.safetensors"
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
        model = model_or_path if folder is None else load_dense(folder).to(device)
        calibration = _statistics(model, text, seed, progress)
    recipe = {"level": level, "seed": str(seed)}
    if calibration is not None:
        recipe["calibration"] = statistics_digest(calibration)
    if source.identity() is not None and importance is None:
        recipe["source"] = source.identity()
    job = Job(source, out, layout, settings, calibration, importance, recipe, progress)
    if level == "best" and model is not None:
        _write_tuned(job, model, text, tuning or TuningOptions(seed=seed))
    else:
        write_folder(job)
    return out


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


def _write_tuned(job: Job, model: PreTrainedModel, windows: Windows, options: TuningOptions) -> None:
    """Codes into a draft, tables tuned on it, and both together into the folder."""
    job = job._replace(recipe={**job.recipe, "tuning": " ".join(map(str, (*options, len(windows.tokens))))})
    draft_folder = job.out / DRAFT
    writer = job.writer(job.out)
    try:
        job.source.write_rest(job.out)
        draft = _draft(job, draft_folder)
        tables = _tuned_tables(job, model, draft, windows, options)
        for index, shape in enumerate(job.layout.moe_layers):
            stakes, weights = job.measured.importance(index), job.source.weights(index)
            for block in (b for b in job.layout.blocks() if b.layer == shape.layer):
                if job.layout.row(block) == writer.next_row:
                    packed = draft.block(block)
                    packed = packed._replace(tables=packed.tables | {bits: t[block] for bits, t in tables.items()})
                    weight = weights[block.projection][block.expert]
                    s_bar = stakes[block.projection].s_bar(block.expert, weight, packed, job.layout.widths)
                    writer.add(block, packed, s_bar)
            job.source.release(index)
        finish_folder(job, writer)
    finally:
        writer.close()
    shutil.rmtree(draft_folder)


def _draft(job: Job, folder: Path) -> Checkpoint:
    """The finished draft of this recipe, written now as far as it is not there."""
    if (folder / FOLDER / METADATA).is_file() and Checkpoint.open(folder).recipe == job.recipe:
        return Checkpoint.open(folder)
    (folder / TUNED).unlink(missing_ok=True)
    writer = job.writer(folder)
    try:
        write_pages(job, writer)
        writer.finish()
    finally:
        writer.close()
    return Checkpoint.open(folder)


def _tuned_tables(
    job: Job, model: PreTrainedModel, draft: Checkpoint, windows: Windows, options: TuningOptions
) -> dict[int, Mapping[BlockId, Tensor]]:
    """The draft's tables after tuning; those of a killed run that had come so far."""
    path = job.out / DRAFT / TUNED
    if not path.is_file():
        total, done = tuning_steps(job.layout, windows, options), 0

        def advance() -> None:
            nonlocal done
            done += 1
            job.progress("tuning", done, total)

        found = find_experts(model)
        tables = tune_tables(model, found, job.layout, draft.block, windows, options, advance=advance)
        flat = {f"{bits}.{block}": t for bits, own in tables.items() for block, t in own.items()}
        unfinished = path.with_name(f"{path.name}.tmp")
        save_file(flat, unfinished)
        sync_and_rename(unfinished, path)
    flat = load_file(path)
    return {bits: {b: flat[f"{bits}.{b}"] for b in job.layout.blocks()} for bits in tuned_widths(job.layout)}
