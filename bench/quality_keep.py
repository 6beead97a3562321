"""What the quality benches make once and keep for another run: statistics, linear-blocks by method, and policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.quality_parts import Trained, quantized
from pagedweight.calibration.collect import STATISTICS_WINDOWS, collect
from pagedweight.calibration.pipeline import REPORT, Options, calibrate_model
from pagedweight.calibration.statistics import Statistics
from pagedweight.calibration.stored import is_whole, load_statistics, save_statistics
from pagedweight.checkpoint import FOLDER, METADATA, Checkpoint, CheckpointWriter
from pagedweight.layout import BlockId, PackedBlock
from pagedweight.policy import Policy

COLLECT_ROWS = {"cpu": 8, "cuda": 64}
Progress = Callable[[str, int, int], None]


class Kept(NamedTuple):
    """Where one model's results are kept; None keeps nothing."""

    trained: Trained
    folder: Path | None

    @classmethod
    def of(cls, trained: Trained, keep: Path | None) -> Kept:
        """A folder for the model and its number of calibration windows."""
        return cls(trained, None if keep is None else keep / f"{trained.name}-{len(trained.calibration.tokens)}")

    def statistics(self, advance: Callable[[int], None] = lambda sequences: None) -> Statistics:
        """Of the calibration text."""
        trained = self.trained
        if self.folder is not None and is_whole(self.folder / "statistics"):
            return load_statistics(self.folder / "statistics", trained.device)
        batches = trained.calibration.first(STATISTICS_WINDOWS).batches(
            COLLECT_ROWS[trained.device.type], trained.device
        )
        statistics = collect(trained.model, trained.found, batches, advance=advance)
        if self.folder is not None:
            save_statistics(statistics, self.folder / "statistics")
        return statistics

    def blocks(self, method: str, statistics: Statistics) -> dict[BlockId, PackedBlock]:
        """Every linear-block as a method makes it, on the model's device."""
        trained = self.trained
        if self.folder is None:
            return quantized(trained, method, statistics)
        folder = self.folder / method_slug(method)
        if not (folder / FOLDER / METADATA).exists():
            made = quantized(trained, method, statistics)
            writer = CheckpointWriter(folder, trained.layout)
            for block in trained.layout.blocks():
                writer.add(block, _moved(made[block], "cpu"))
            writer.finish()
        checkpoint = Checkpoint.open(folder)
        return {block: _moved(checkpoint.block(block), trained.device) for block in trained.layout.blocks()}

    def policy(
        self,
        method: str,
        blocks: dict[BlockId, PackedBlock],
        statistics: Statistics,
        options: Options,
        progress: Progress,
    ) -> tuple[Policy, dict[str, Any]]:
        """The policy calibrated for a method's linear-blocks, from calibration text alone, and calibration's report."""
        folder = None if self.folder is None else self.folder / method_slug(method) / FOLDER
        if folder is None or not (folder / REPORT).exists():
            trained = self.trained
            made = calibrate_model(
                trained.model, trained.layout, blocks.__getitem__, trained.calibration, options, progress, statistics
            )
            if folder is None:
                return made.policy, made.report()
            made.write(folder)
        return Policy.load(folder), json.loads((folder / REPORT).read_text(encoding="utf-8"))


def method_slug(method: str) -> str:
    """A method's name for files."""
    return method.replace(", ", "-").replace(" ", "-")


def _moved(packed: PackedBlock, device: torch.device | str) -> PackedBlock:
    tables = {bits: table.to(device) for bits, table in packed.tables.items()}
    return PackedBlock(packed.planes.to(device), tables, packed.columns)
