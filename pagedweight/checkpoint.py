"""The page files of a checkpoint: written in row order and finished atomically, read page by page.

A checkpoint's folder holds `pagedweight/metadata.json` and the shards it lists. Up to `finish` the same document is
`partial.json`, which does not load and from which a killed run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pagedweight.checkpoint_format import (
    FOLDER,
    METADATA,
    PARTIAL,
    SHARD_NAME,
    CheckpointError,
    Document,
    Shard,
    Specs,
    block_specs,
    block_tensors,
    differences,
    dump,
    file_sha256,
    join_table,
    parse,
    specs_of,
    table_parts,
    why_unread,
)
from pagedweight.checkpoint_header import Header, TensorReader, leaves_folder, read_header
from pagedweight.checkpoint_shard import ShardWriter, specs_bytes, sync_and_rename
from pagedweight.layout import BlockId, Layout, PackedBlock

__all__ = ["Checkpoint", "CheckpointError", "CheckpointWriter"]

SHARD_BYTES = 1 << 28  # what a killed run has to do again, at most


class CheckpointWriter:
    """Writes a checkpoint's linear-blocks in row order, each as it comes; nothing is kept in memory.

    A new writer removes what an earlier one left in `directory / "pagedweight"`; with `resume` it keeps the shards of
    an unfinished run over the same layout by the same recipe, and `next_row` says where to go on.
    recipe: what the linear-blocks were made from and how, as strings, for a reader and to tell runs apart.
    """

    def __init__(
        self,
        directory: str | Path,
        layout: Layout,
        *,
        shard_bytes: int = SHARD_BYTES,
        resume: bool = False,
        recipe: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = Path(directory) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._layout = layout
        self._recipe = dict(recipe or {})
        self._blocks = list(layout.blocks())
        self._shapes = layout.row_shapes()
        self._shard_bytes = shard_bytes
        self._shards: list[Shard] = []
        self._s_bar: list[list[float]] = []
        self._shard: ShardWriter | None = None
        self._first_row = self.next_row = 0
        if resume:
            self._take_up()
        self._clean()

    @property
    def s_bar(self) -> list[list[float]]:
        """Damage by row, as far as linear-blocks came with it."""
        return self._s_bar

    def add(self, block: BlockId, packed: PackedBlock, s_bar: Sequence[float] = ()) -> None:
        """Take the next linear-block, row `next_row`. ValueError when it is not the next one or does not fit.

        s_bar: its damage by width, kept with an unfinished run so that one that goes on has it.
        """
        row = self.next_row
        if row == len(self._blocks) or block != self._blocks[row]:
            wanted = self._blocks[row] if row < len(self._blocks) else "none, all are written"
            raise ValueError(f"got {block}; the next linear-block in row order is {wanted}")
        missing = set(self._layout.widths) - packed.tables.keys()
        if missing:
            raise ValueError(f"{block} has no table of {sorted(missing)} bits; quantize it at {self._layout.widths}")
        tensors = block_tensors(self._layout, block, packed)
        wrong = differences(specs_of(tensors), block_specs(self._layout, block, self._shapes[row]))
        if wrong or packed.columns != self._shapes[row][1]:
            raise ValueError(f"{block} does not fit the layout: {wrong or f'it has {packed.columns} columns'}")
        if self._shard is None:
            self._shard = ShardWriter(self._folder / self._shard_name(), self._shard_specs())
        self._shard.write(tensors)
        self._s_bar.append([float(value) for value in s_bar])
        self.next_row += 1
        if self._shard.full:
            self._end_shard(self._shard)

    def finish(self) -> None:
        """Make the checkpoint loadable. ValueError when linear-blocks are missing."""
        if self.next_row < len(self._blocks):
            raise ValueError(
                f"{self.next_row} of {len(self._blocks)} linear-blocks are written; add the rest before finish()"
            )
        self._write(METADATA, dump(Document(self._layout, self._shards, self._recipe)))
        (self._folder / PARTIAL).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file that is being written; what is on disk stays for a run that goes on."""
        if self._shard is not None:
            self._shard.abandon()

    def _shard_name(self) -> str:
        return f"pages-{len(self._shards) + 1:05d}.safetensors"

    def _shard_specs(self) -> Specs:
        """The tensors of the next shard: whole linear-blocks, until it is large enough."""
        specs: Specs = {}
        size = 0
        for row in range(self.next_row, len(self._blocks)):
            own = block_specs(self._layout, self._blocks[row], self._shapes[row])
            specs.update(own)
            size += specs_bytes(own)
            if size >= self._shard_bytes:
                break
        return specs

    def _end_shard(self, shard: ShardWriter) -> None:
        name, rows = self._shard_name(), self.next_row - self._first_row
        digest = shard.close()
        self._shards.append(Shard(name, self._first_row, rows, digest.bytes, digest.header_sha256, digest.sha256))
        self._shard, self._first_row = None, self.next_row
        self._write(PARTIAL, dump(Document(self._layout, self._shards, self._recipe, self._s_bar)))

    def _write(self, name: str, text: str) -> None:
        unfinished = self._folder / f"{name}.tmp"
        unfinished.write_text(text, encoding="utf-8")
        sync_and_rename(unfinished, self._folder / name)

    def _take_up(self) -> None:
        """Go on from an unfinished run, if it is whole and of the same layout and recipe."""
        if not (self._folder / PARTIAL).exists():
            return
        document = parse(self._folder / PARTIAL)
        same = dump(document._replace(shards=[], s_bar=None)) == dump(Document(self._layout, [], self._recipe))
        whole = all(
            (self._folder / shard.file).is_file() and file_sha256(self._folder / shard.file) == shard.sha256
            for shard in document.shards
        )
        if same and whole:
            self._shards, self._s_bar = document.shards, document.s_bar or []
            self._first_row = self.next_row = sum(shard.rows for shard in document.shards)

    def _clean(self) -> None:
        kept = {shard.file for shard in self._shards} | ({PARTIAL} if self._shards else set())
        for path in sorted(self._folder.iterdir()):
            name = path.name.removesuffix(".tmp")
            ours = name in (METADATA, PARTIAL) or SHARD_NAME.fullmatch(name)
            if ours and path.name not in kept:
                path.unlink()


class Checkpoint:
    """An open checkpoint: the layout, and pages read from the shards when asked for.

    `open` checks the metadata, every file's size, header and tensor names; `verify` also reads and hashes every byte.
    """

    def __init__(self, folder: Path, document: Document) -> None:
        self.layout = document.layout
        self.recipe = document.recipe
        self._folder = folder
        self._shards = document.shards
        self._headers: dict[str, Header] = {}
        self._readers: dict[str, TensorReader] = {}

    @cached_property
    def _shapes(self) -> list[tuple[int, int]]:
        return self.layout.row_shapes()  # not before the files have been seen to hold so many

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """The checkpoint in `directory`; CheckpointError when it is missing, unfinished or damaged."""
        folder = Path(directory) / FOLDER
        if not (folder / METADATA).is_file():
            raise CheckpointError(f"{folder} has no {METADATA}{why_unread(Path(directory))}")
        checkpoint = cls(folder, parse(folder / METADATA))
        checkpoint._check_headers()
        return checkpoint

    def plane(self, block: BlockId, plane: int) -> Tensor:
        """One page, (N, ceil(K / 32)) int32 that holds uint32 words; plane 0 is the most significant bit.

        CheckpointError when it cannot be read.
        """
        return self._tensor(block, f"plane{plane}").view(torch.int32)

    def planes(self, block: BlockId) -> Tensor:
        """All pages of a linear-block, (P, N, ceil(K / 32)) int32."""
        return torch.stack([self.plane(block, plane) for plane in range(self.layout.parent_width)])

    def table(self, block: BlockId, bits: int) -> Tensor:
        """One width's table as `pagedweight.bitplane.table_values` takes it; KeyError for an unsupported width."""
        return join_table([self._tensor(block, suffix) for suffix in table_parts(self.layout.codebooks[bits], bits)])

    def block(self, block: BlockId) -> PackedBlock:
        """A whole linear-block; KeyError when the layout has none such."""
        columns = self._shapes[self.layout.row(block)][1]
        return PackedBlock(self.planes(block), {bits: self.table(block, bits) for bits in self.layout.widths}, columns)

    def verify(self, progress: Callable[[str, int, int], None] = lambda step, done, total: None) -> None:
        """Read every byte and compare checksums; CheckpointError names the first shard that differs.

        progress: called with ("checksums", done, total) linear-blocks.
        """
        for shard in self._shards:
            progress("checksums", shard.first_row, self.layout.rows)
            if file_sha256(self._folder / shard.file) != shard.sha256:
                raise CheckpointError(f"{self._folder / shard.file} is damaged: its checksum differs; copy it again")
        progress("checksums", self.layout.rows, self.layout.rows)

    def _tensor(self, block: BlockId, suffix: str) -> Tensor:
        row = self.layout.row(block)
        shard = next(shard for shard in self._shards if row < shard.first_row + shard.rows)
        path = self._folder / shard.file
        try:
            if shard.file not in self._readers:
                self._readers[shard.file] = TensorReader(path, self._headers[shard.file].entries)
            return self._readers[shard.file].tensor(f"{block}.{suffix}")
        except OSError as error:
            raise CheckpointError(f"{block}.{suffix} cannot be read from {path}: {error}") from error

    def _wanted(self) -> Iterator[tuple[Shard, Specs]]:
        blocks = list(self.layout.blocks())
        for shard in self._shards:
            rows = range(shard.first_row, shard.first_row + shard.rows)
            specs: Specs = {}
            for row in rows:
                specs.update(block_specs(self.layout, blocks[row], self._shapes[row]))
            yield shard, specs

    def _check_headers(self) -> None:
        edges = [0, *(shard.first_row + shard.rows for shard in self._shards)]
        if [shard.first_row for shard in self._shards] != edges[:-1] or edges[-1] != self.layout.rows:
            raise CheckpointError(f"{self._folder / METADATA} is damaged: its shards do not cover every linear-block")
        for shard in self._shards:
            self._headers[shard.file] = self._header(shard)
        wanted = {shard.file: specs for shard, specs in self._wanted()}
        got = {
            file: {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}
            for file, header in self._headers.items()
        }
        self._check_names(got, wanted)
        for shard in self._shards:
            header = self._headers[shard.file]
            if header.bytes != shard.bytes:
                raise CheckpointError(
                    f"{self._folder / shard.file} has {header.bytes} bytes and should have {shard.bytes}; copy it again"
                )
            if header.sha256 != shard.header_sha256:
                raise CheckpointError(f"the header of {self._folder / shard.file} is damaged; copy the file again")

    def _header(self, shard: Shard) -> Header:
        """A shard's head, which has as many tensors as its linear-blocks need: what the metadata says of their number
        is not believed before."""
        path = self._folder / shard.file
        if not path.exists():
            raise CheckpointError(f"{path} is missing; it should have {shard.bytes} bytes")
        if leaves_folder(path):
            raise CheckpointError(f"{path} is a link out of its folder; copy the file there")
        try:
            header = read_header(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the header of {path} cannot be read ({error}); the file has {path.stat().st_size} bytes and should "
                f"have {shard.bytes}"
            ) from error
        if shard.rows * self.layout.parent_width > len(header.entries):
            raise CheckpointError(
                f"{path} holds {len(header.entries)} tensors, fewer than {shard.rows} linear-blocks have; the files do "
                "not belong together"
            )
        return header

    def _check_names(self, got: dict[str, Specs], wanted: dict[str, Specs]) -> None:
        for file, specs in got.items():
            owner = next((other for other in wanted if specs.keys() == wanted[other].keys()), file)
            if owner != file:
                raise CheckpointError(f"{self._folder / file} holds the tensors of {owner}; the files were swapped")
        tensors = ({name: spec for one in files.values() for name, spec in one.items()} for files in (got, wanted))
        problems = differences(*tensors)
        if problems:
            raise CheckpointError(f"the shards in {self._folder} do not hold the layout's tensors: {problems}")
