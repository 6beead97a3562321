"""Where a rank's pages come from: a checkpoint, float weights quantized while loading, or thin air for timing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pagedweight.bitplane import plane_words
from pagedweight.checkpoint import FOLDER, Checkpoint
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.shares import ExpertShare
from pagedweight.layout import BlockId, Layout, MoeLayer, PackedBlock, Projection, table_form
from pagedweight.patching_pages import layout_of
from pagedweight.patching_quantize import quantized_blocks
from pagedweight.quant.levels import Settings


class FloatExperts(NamedTuple):
    """Weights as vLLM loads them: gate_up (E, 2I, H) and down (E, H, I), this rank's part."""

    gate_up: torch.Tensor
    down: torch.Tensor


class PageSource(Protocol):
    """Linear-blocks of one rank. needs_float: whether vLLM must load the experts' float weights first."""

    needs_float: bool

    def layout(self, shapes: list[MoeLayer]) -> Layout: ...

    def blocks(
        self, share: ExpertShare, layout: Layout, weights: FloatExperts | None
    ) -> Iterator[tuple[BlockId, PackedBlock]]:
        """A layer's linear-blocks in row order, experts numbered as on this rank."""
        ...

    def s_bar(self, layout: Layout) -> np.ndarray | None:
        """(R, W), damage per routing mass of this rank's parts, once all are read; None where a policy has it."""
        ...


class CheckpointPages:
    """Pages of a quantized folder, read one linear-block at a time and cut to the rank's part."""

    needs_float = False

    def __init__(self, directory: Path) -> None:
        self._checkpoint = Checkpoint.open(directory)
        self._wholes = {moe.layer: moe for moe in self._checkpoint.layout.moe_layers}

    def layout(self, shapes: list[MoeLayer]) -> Layout:
        whole = self._checkpoint.layout
        return Layout(tuple(shapes), whole.widths, whole.codebooks)

    def blocks(
        self, share: ExpertShare, layout: Layout, weights: FloatExperts | None
    ) -> Iterator[tuple[BlockId, PackedBlock]]:
        self._check(share)
        for local, expert in enumerate(share.experts):
            for projection in Projection:
                whole = BlockId(share.layer, expert, projection)
                yield whole._replace(expert=local), share.cut(whole, self._checkpoint.block(whole))

    def s_bar(self, layout: Layout) -> None:
        return None

    def _check(self, share: ExpertShare) -> None:
        """ValueError unless the checkpoint's layer is the one that the model has."""
        whole = self._wholes.get(share.layer)
        found = (share.total, share.hidden, share.intermediate * share.parts, share.activation)
        if whole is None or (whole.experts, whole.hidden, whole.intermediate, whole.activation) != found:
            raise ValueError(
                f"layer {share.layer} of the model has experts, hidden, intermediate and activation {found}, the pages "
                f"hold {whole}; quantize this model again"
            )


class QuantizedNow:
    """Float experts of an ordinary checkpoint, quantized on their device, layer by layer, at level "fast"."""

    needs_float = True

    def __init__(self, options: ServingOptions) -> None:
        self._options = options
        self._s_bar: list[np.ndarray] = []

    def layout(self, shapes: list[MoeLayer]) -> Layout:
        return layout_of(shapes, self._options.widths, self._options.codebooks)

    def blocks(
        self, share: ExpertShare, layout: Layout, weights: FloatExperts | None
    ) -> Iterator[tuple[BlockId, PackedBlock]]:
        settings = Settings("fast", layout.widths, layout.codebooks)
        for made in quantized_blocks(share.shape, weights, settings):
            self._s_bar.append(made.s_bar)
            yield made.block, made.packed

    def s_bar(self, layout: Layout) -> np.ndarray:
        return np.stack(self._s_bar)


class DrawnPages:
    """Random planes and small tables, the same for every expert of a shape: for timing, with load_format="dummy"."""

    needs_float = False

    def __init__(self, options: ServingOptions) -> None:
        self._options = options
        self._drawn: dict[tuple[int, int], PackedBlock] = {}

    def layout(self, shapes: list[MoeLayer]) -> Layout:
        return layout_of(shapes, self._options.widths, self._options.codebooks)

    def blocks(
        self, share: ExpertShare, layout: Layout, weights: FloatExperts | None
    ) -> Iterator[tuple[BlockId, PackedBlock]]:
        for expert in range(len(share.experts)):
            for projection in Projection:
                rows, columns = share.shape.shape(projection)
                if (rows, columns) not in self._drawn:
                    self._drawn[rows, columns] = draw_block(rows, columns, layout.widths, layout.codebooks)
                yield BlockId(share.layer, expert, projection), self._drawn[rows, columns]

    def s_bar(self, layout: Layout) -> np.ndarray:
        """Each bit less makes four times the error, as in trained weights; some linear-blocks matter more."""
        weight = np.random.default_rng(0).lognormal(size=layout.rows)
        return weight[:, None] * 4.0 ** -np.array(layout.widths)


def draw_block(rows: int, columns: int, widths: tuple[int, ...], codebooks: Mapping[int, str]) -> PackedBlock:
    """A linear-block with random codes, whose weights are about as large as a trained model's."""
    generator = np.random.default_rng(rows * columns)
    planes = generator.integers(-(2**31), 2**31, (widths[-1], rows, plane_words(columns)), dtype=np.int32)
    scale = columns**-0.5
    tables = {}
    for bits in widths:
        dtype, entries = table_form(codebooks[bits], bits)
        if dtype is torch.uint8:
            scales = torch.full((rows, 1), scale / 64, dtype=torch.float32).view(torch.uint8)
            steps = torch.linspace(0, 127, entries - 4, dtype=torch.float32).to(torch.uint8)
            tables[bits] = torch.cat([steps.expand(rows, -1), scales], dim=1)
        elif entries == 2:
            tables[bits] = torch.tensor([2 * scale / 2**bits, 0.0], dtype=dtype).repeat(rows, 1)
        else:
            tables[bits] = torch.linspace(-scale, scale, entries, dtype=torch.float32).to(dtype).repeat(rows, 1)
    return PackedBlock(torch.from_numpy(planes), tables, columns)


def choose_source(model: str, load_format: str, options: ServingOptions) -> PageSource:
    """Pages of the folder if it has any, drawn ones for load_format "dummy", else quantized while loading."""
    if (Path(model) / FOLDER).is_dir() and load_format != "dummy":
        return CheckpointPages(Path(model))
    return DrawnPages(options) if load_format == "dummy" else QuantizedNow(options)
