"""Level best with text: codes into a draft, tables tuned on it, and both together into the folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from torch import Tensor

from pagedweight.calibration.text import Windows
from pagedweight.calibration.tuning import TuningOptions, tune_tables, tuned_widths, tuning_steps
from pagedweight.checkpoint import FOLDER, METADATA, Checkpoint
from pagedweight.checkpoint_shard import sync_and_rename
from pagedweight.discovery import find_experts
from pagedweight.layout import BlockId
from pagedweight.saving_quantize import Job, finish_folder, write_pages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT = "pagedweight-draft"  # a folder of its own in the one that is written; gone at the end
TUNED = "tuned.safetensors"


def write_tuned(job: Job, model: PreTrainedModel, windows: Windows, options: TuningOptions) -> None:
    """The whole folder, from where a killed run stopped. model: the unquantized one, as it was calibrated."""
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


def _draft(job: Job, folder: Path) -> Checkpoint:
    """The finished draft of this recipe, written now as far as it is not there."""
    if "source" in job.recipe and (folder / FOLDER / METADATA).is_file():
        kept = Checkpoint.open(folder)
        if (kept.recipe, kept.layout) == (job.recipe, job.layout):
            return kept
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
