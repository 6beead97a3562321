"""Write a dense model as a folder of pages: layer by layer, from where a killed run stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagedweight.checkpoint import FOLDER, CheckpointWriter
from pagedweight.layout import Layout
from pagedweight.patching_quantize import Importance, Measured, quantized_blocks, sensitivity_policy
from pagedweight.quant.levels import Settings
from pagedweight.saving_source import Source

Progress = Callable[[str, int, int], None]


class Job(NamedTuple):
    """One model to write into `out`. measured, importance: what errors are weighed with, see `quantized_blocks`.

    recipe: what the pages are made from and how; with "source" in it, a killed run of the same recipe is taken up.
    progress: called with (layer, done, total) linear-blocks.
    """

    source: Source
    out: Path
    layout: Layout
    settings: Settings
    measured: Measured | None
    importance: Importance | None
    recipe: Mapping[str, str]
    progress: Progress

    def writer(self, folder: Path) -> CheckpointWriter:
        return CheckpointWriter(folder, self.layout, resume="source" in self.recipe, recipe=self.recipe)


def write_pages(job: Job, writer: CheckpointWriter) -> None:
    """Every linear-block that the writer does not have yet."""
    for index, shape in enumerate(job.layout.moe_layers):
        if job.layout.first_row(index) + 2 * shape.experts <= writer.next_row:
            continue
        stakes = None if job.measured is None else job.measured.importance(index)
        weights = job.source.weights(index)
        for made in quantized_blocks(shape, weights, job.settings, stakes=stakes, importance=job.importance):
            if job.layout.row(made.block) == writer.next_row:
                writer.add(*made)
                job.progress(f"layer {shape.layer}", writer.next_row, job.layout.rows)
        del weights
        job.source.release(index)


def finish_folder(job: Job, writer: CheckpointWriter) -> None:
    """Make the folder loadable; every linear-block is written."""
    sensitivity_policy(job.layout, np.array(writer.s_bar), job.measured).save(job.out / FOLDER)
    writer.finish()


def write_folder(job: Job) -> None:
    """The whole folder. It loads once everything is there, and not before."""
    writer = job.writer(job.out)
    try:
        job.source.write_rest(job.out)
        write_pages(job, writer)
        finish_folder(job, writer)
    finally:
        writer.close()
