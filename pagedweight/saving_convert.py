"""convert(): a checkpoint's tables as 16-bit ones, its codes and every value as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pagedweight.bitplane import table_values
from pagedweight.checkpoint import FOLDER, METADATA, Checkpoint, CheckpointWriter
from pagedweight.checkpoint_format import SHARD_NAME
from pagedweight.layout import Layout, PackedBlock
from pagedweight.quant.codebooks import FP16_MAX
from pagedweight.saving_source import refuse_dense

Progress = Callable[[str, int, int], None]


def convert(
    checkpoint: str | Path,
    out: str | Path,
    codebooks: Mapping[int, str],
    *,
    progress: Progress = lambda step, done, total: None,
) -> Path:
    """Write a checkpoint's folder again with some widths' tables as 16-bit ones; returns the new folder.

    Nothing is quantized again: planes, and all files that are no pages, are copied. lut16 holds every value that
    another codebook gives, to fp16; the ways back would change values, so they are refused, and so are others.
    codebooks: by width, "lut16" or what the width has. progress: called with ("convert", done, total) linear-blocks.
    ValueError, before anything is written, for a width that the checkpoint lacks, another codebook, the checkpoint's
    own folder, or a dense model's; CheckpointError when there is no checkpoint. A run that stopped leaves no folder
    that loads.
    """
    source, out = Checkpoint.open(checkpoint), Path(out)
    old = source.layout
    for bits, codebook in codebooks.items():
        if bits not in old.widths:
            raise ValueError(f"the checkpoint has no width {bits}; it has {', '.join(map(str, old.widths))}")
        if codebook not in ("lut16", old.codebooks[bits]):
            raise ValueError(
                f"{old.codebooks[bits]} to {codebook} at {bits} bits would change values; convert to lut16, or "
                f"quantize the model with codebooks={{{bits}: {codebook!r}}}"
            )
    if out.exists() and Path(checkpoint).samefile(out):
        raise ValueError(f"{out} holds the checkpoint itself; write to another folder")
    refuse_dense(out)
    new = Layout(old.moe_layers, old.widths, {**old.codebooks, **codebooks})
    changed = [bits for bits in old.widths if new.codebooks[bits] != old.codebooks[bits]]
    said = {f"converted_{bits}": f"{old.codebooks[bits]} to lut16" for bits in changed}
    writer = CheckpointWriter(out, new, recipe={**source.recipe, **said})
    try:
        for done, block in enumerate(new.blocks(), 1):
            writer.add(block, _with_tables(source.block(block), changed))
            progress("convert", done, new.rows)
        _copy_rest(Path(checkpoint), out)
        writer.finish()
    finally:
        writer.close()
    return out


def _with_tables(packed: PackedBlock, widths: Sequence[int]) -> PackedBlock:
    """The linear-block with 16-bit tables of the same values at some widths."""
    values = {bits: table_values(packed.tables[bits], bits) for bits in widths}
    return packed._replace(
        tables={**packed.tables, **{bits: v.clamp(-FP16_MAX, FP16_MAX).half() for bits, v in values.items()}}
    )


def _copy_rest(source: Path, out: Path) -> None:
    """Everything but the pages and what describes them: other weights, config, tokenizer, policy."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        pages = name.parts[0] == FOLDER and (SHARD_NAME.fullmatch(path.name) or path.name == METADATA)
        if path.is_file() and not pages:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, out / name)
