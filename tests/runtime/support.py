"""A tiny model's worth of random pages, and a transfer engine that does nothing until a test turns its crank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedweight.layout import BlockTables, Layout, MoeLayer
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.frames import Arena, OutOfFrames
from pagedweight.runtime.kv import ArenaGauge, KVGauge
from pagedweight.runtime.pages import HostPages, PageSizes
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.transfer import FrameCopy, ImmediateEngine, TransferEngine

FRAME_BYTES = 128


class ForgetfulPages(HostPages):
    """Host pages of which some are on the device alone, as if they had been made there."""

    def forget(self, row: int, plane: int) -> None:
        """Let a page's copy go; its room is what a write-back goes to."""
        self._reserved[row, plane] = self._pages.pop((row, plane))


class ShortHostPages(ForgetfulPages):
    """Has no memory for a page when it is told so."""

    short = False

    def reserve(self, row, plane):
        if self.short:
            self.short = False
            raise MemoryError("no memory for a page")
        return super().reserve(row, plane)


class ShortArena(Arena):
    """Refuses an allocation, the next one or a later one, when it is told so."""

    refused = 0

    def allocate(self, count, owner):
        self._refuse()
        return super().allocate(count, owner)

    def allocate_run(self, count, owner):
        self._refuse()
        return super().allocate_run(count, owner)

    def _refuse(self):
        self.refused -= 1
        if self.refused == 0:
            raise OutOfFrames("refused")


class TinyModel(NamedTuple):
    """pages (by row, uint8 (P, bytes)) and tables (by row and width) are the truth; host copies may be forgotten."""

    layout: Layout
    sizes: PageSizes
    host: HostPages
    pages: dict[int, np.ndarray]
    tables: dict[tuple[int, int], np.ndarray]

    def resident_frames(self, bits: int) -> int:
        """Frames of every row at one width."""
        return int(self.sizes.resident_bytes()[:, self.layout.widths.index(bits)].sum()) // FRAME_BYTES


def tiny_model(
    experts: tuple[int, ...] = (3, 2),
    widths: tuple[int, ...] = (2, 3, 4, 6),
    host_pages: type[HostPages] = ForgetfulPages,
) -> TinyModel:
    """Layers of different sizes, so that rows differ in frames; the model's own layer numbers have gaps."""
    layers = tuple(MoeLayer(3 * at + 1, count, 8 + 8 * at, 4 + 8 * at) for at, count in enumerate(experts))
    layout = Layout(layers, widths, dict.fromkeys(widths, "lut16"))
    plane_frames = np.array([1 + (n * k) // 128 for n, k in layout.row_shapes()])
    sizes = PageSizes.of(layout, plane_frames, FRAME_BYTES)
    host, pages, tables = host_pages(sizes), {}, {}
    rng = np.random.default_rng(7)
    for row, (n, _) in enumerate(layout.row_shapes()):
        pages[row] = rng.integers(0, 256, (layout.parent_width, plane_frames[row] * FRAME_BYTES), dtype=np.uint8)
        for plane, page in enumerate(pages[row]):
            host.store(row, plane, torch.from_numpy(page))
        for width in widths:
            tables[row, width] = rng.integers(0, 256, n * 2 * 2**width, dtype=np.uint8)
            host.store_table(row, width, torch.from_numpy(tables[row, width]))
    return TinyModel(layout, sizes, host, pages, tables)


def random_policy(layout: Layout, seed: int = 0) -> Policy:
    """Damage that falls with width, different for every row."""
    rng = np.random.default_rng(seed)
    s_bar = rng.uniform(0.5, 2.0, (layout.rows, 1)) * 4.0 ** -np.array(layout.widths)
    return Policy.from_sensitivity(layout, s_bar, np.ones(layout.rows))


def tiny_runtime(
    model: TinyModel,
    frames: int,
    config: RuntimeConfig | None = None,
    *,
    gauge: KVGauge | None = None,
    engine: type[TransferEngine] = ImmediateEngine,
    block_frames: int = 4,
) -> Runtime:
    """A runtime over an arena of so many frames; its KV blocks are counted there unless a gauge is given."""
    arena = Arena(frames * FRAME_BYTES, FRAME_BYTES)
    arena.memory.fill_(0xA5)
    return Runtime(
        model.layout,
        model.host,
        arena,
        random_policy(model.layout),
        config or RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=2),
        engine(arena),
        gauge or ArenaGauge(arena, block_frames),
    )


def assert_published(
    model: TinyModel, tables: BlockTables, arena: Arena, *, pages: bool = True, slots: bool = True
) -> None:
    """What a kernel that starts now would read are the right pages and the right tables (slots), for every row."""
    memory, base = arena.memory.numpy(), arena.memory.data_ptr()
    rows = memory.reshape(-1, FRAME_BYTES)
    frames = (tables.frame_address.numpy() - base) // FRAME_BYTES
    starts = tables.table_address.numpy() - base
    for row, bits in enumerate(tables.bits.tolist()):
        if not bits:
            continue
        start, table = starts[row], model.tables[row, bits]
        assert start >= 0
        assert not slots or memory[start : start + len(table)].tobytes() == table.tobytes(), (row, bits)
        used = frames[row, :bits, : model.sizes.plane_frames[row]]
        assert (used >= 0).all(), (row, bits)
        assert not pages or rows[used].tobytes() == model.pages[row][:bits].tobytes(), (row, bits)


def host_has(model: TinyModel, row: int, plane: int) -> bool:
    """Whether the host holds this page, with the right bytes."""
    page = model.host.page(row, plane)
    return page is not None and page.numpy().tobytes() == model.pages[row][plane].tobytes()


class TransferFault(RuntimeError):
    """What a failed copy raises here."""


# What a boundary may raise when everything around it fails.
FAULTS = (TransferFault, MemoryError, OutOfFrames)


class CrankedTicket:
    """Unfinished until the engine is turned; waiting turns it."""

    def __init__(self, engine: CrankedEngine, copies: Sequence[FrameCopy], inwards: bool) -> None:
        self._engine = engine
        self._copies = copies
        self._inwards = inwards
        self._launched = len(engine.forwards)
        self.moves_bytes = bool(copies)
        self.finished = False
        self.failed = False

    def done(self) -> bool:
        if self.failed:
            raise TransferFault("the copy failed")
        return self.finished

    def wait(self) -> None:
        if not self.finished:
            self.turn()
        self.done()

    def seconds(self) -> float:
        return 1e-3

    def turn(self, *, fail: bool = False) -> None:
        """Finish: forwards launched before end first, then bytes move. A failure leaves them half moved."""
        self._engine.finish_forwards(self._launched)
        for copy in self._copies[: len(self._copies) // 2 if fail else None]:
            self._engine.move(copy, self._inwards)
        self.finished, self.failed = True, fail
        self._engine.pending.remove(self)


class CrankedEngine:
    """Copies and fences finish one by one, in the order a test likes; forwards read when a fence says they end.

    forwards: device tables as they were at each launch, None once that forward has ended.
    """

    def __init__(self, arena: Arena) -> None:
        self.model: TinyModel | None = None
        self.pending: list[CrankedTicket] = []
        self.forwards: list[BlockTables | None] = []
        self._slots_read = 0
        self.fail_next_write = False
        self.fail_next_launch = False
        self.fail_next_fence = False
        self._arena = arena

    def copy_in(self, copies: Sequence[FrameCopy]) -> CrankedTicket:
        self._launch()
        return self._ticket(copies, inwards=True)

    def copy_out(self, copies: Sequence[FrameCopy]) -> CrankedTicket:
        self._launch()
        return self._ticket(copies, inwards=False)

    def fence(self) -> CrankedTicket:
        if self.fail_next_fence:
            self.fail_next_fence = False
            raise TransferFault("the event could not be recorded")
        return self._ticket((), inwards=True)

    def write_now(self, copies: Sequence[FrameCopy]) -> None:
        if copies:
            self._read_slots()
        for copy in copies:
            self.move(copy, inwards=True)
            if self.fail_next_write:
                self.fail_next_write = False
                raise TransferFault("the table write failed")

    def upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)

    def relocate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """In stream order every forward launched so far has read everything before a frame moves."""
        self.finish_forwards(len(self.forwards))
        if self.fail_next_write:
            self.fail_next_write = False
            raise TransferFault("the frames could not be relocated")
        self._arena.rows[torch.from_numpy(targets)] = self._arena.rows[torch.from_numpy(sources)]

    def capturing(self) -> bool:
        return False

    def close(self) -> None:
        while self.pending:
            self.pending[0].turn()

    def launch_forward(self, tables: BlockTables) -> None:
        self.forwards.append(BlockTables(*(t.clone() for t in tables[:3]), tables.memory))

    def finish_forwards(self, count: int) -> None:
        """The first `count` forwards end: whatever they were promised must still be there."""
        for at, tables in enumerate(self.forwards[:count]):
            if tables is not None:
                assert_published(self.model, tables, self._arena, slots=at >= self._slots_read)
                self.forwards[at] = None

    def _read_slots(self) -> None:
        """In stream order a forward has read its tables before a slot is overwritten; its pages it may read later."""
        for tables in self.forwards[self._slots_read :]:
            if tables is not None:
                assert_published(self.model, tables, self._arena, pages=False)
        self._slots_read = len(self.forwards)

    def move(self, copy: FrameCopy, inwards: bool) -> None:
        rows, frames = self._arena.rows, torch.from_numpy(copy.frames)
        if inwards:
            rows.index_copy_(0, frames, copy.host.view(len(frames), -1))
        else:
            copy.host.view(len(frames), -1).copy_(rows[frames])

    def _launch(self) -> None:
        if self.fail_next_launch:
            self.fail_next_launch = False
            raise TransferFault("the copy could not be launched")

    def _ticket(self, copies: Sequence[FrameCopy], inwards: bool) -> CrankedTicket:
        self.pending.append(CrankedTicket(self, list(copies), inwards))
        return self.pending[-1]


def everything_at(table: PageTable) -> dict[str, int]:
    """Bytes by owner that the page table accounts for, when nothing is in flight."""
    rows = np.arange(len(table.committed))
    planes = int((table.sizes.plane_frames * table.committed).sum())
    held = int(table.snapshot().bytes[rows, table.width_index(table.committed)].sum())
    return {"plane": planes * FRAME_BYTES, "table": held - planes * FRAME_BYTES}
