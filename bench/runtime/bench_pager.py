"""What a boundary costs on the host, and how fast pages come back. R = 2,880 rows: Qwen1.5-MoE-A2.7B's layout.

Pages are small here (the boundary's cost does not depend on their bytes); the copy rate is measured on CUDA alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.frames import KV_OWNER, Arena, OwnerKind
from pagedweight.runtime.kv import CallableGauge, KVState
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.pages import HostPages, PageSizes
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.table_view import Transition
from pagedweight.runtime.transfer import FrameCopy, ImmediateEngine
from pagedweight.runtime.transfer_cuda import CudaEngine

WIDTHS = (2, 3, 4, 5, 6)
LAYOUT = Layout(tuple(MoeLayer(at, 60, 64, 32) for at in range(24)), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
FRAME_BYTES = 1024


@pytest.fixture(scope="module")
def host() -> HostPages:
    sizes = PageSizes.of(LAYOUT, np.full(LAYOUT.rows, 2), FRAME_BYTES)
    host = HostPages(sizes, None if torch.cuda.is_available() else 0)
    page = torch.zeros(2 * FRAME_BYTES, dtype=torch.uint8)
    for row, (n, _) in enumerate(LAYOUT.row_shapes()):
        for plane in range(6):
            host.store(row, plane, page)
        for width in WIDTHS:
            host.store_table(row, width, torch.zeros(n, 2**width, dtype=torch.float16))
    return host


def make_arena(host: HostPages) -> Arena:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Arena(int(host.sizes.resident_bytes()[:, -1].sum()) + 2**24, FRAME_BYTES, device)


def make_engine(arena: Arena) -> ImmediateEngine | CudaEngine:
    return (CudaEngine if arena.memory.is_cuda else ImmediateEngine)(arena)


@pytest.mark.parametrize("free_blocks", [12, 1000], ids=["between-thresholds", "room-but-all-at-parent"])
def bench_boundary_without_change(benchmark, host, free_blocks):
    arena = make_arena(host)
    s_bar = np.tile(4.0 ** -np.array(WIDTHS), (LAYOUT.rows, 1))
    policy = Policy.from_sensitivity(LAYOUT, s_bar, np.ones(LAYOUT.rows))
    gauge = CallableGauge(lambda: KVState(free_blocks, 2**20))
    runtime = Runtime(LAYOUT, host, arena, policy, RuntimeConfig(plan_period_steps=10**9), make_engine(arena), gauge)
    runtime.boundary()
    benchmark(runtime.boundary)
    assert (runtime.snapshot().bits == 6).all()
    benchmark.extra_info.update(rows=LAYOUT.rows, device=arena.memory.device.type)
    assert benchmark.disabled or benchmark.stats.stats.median < 1e-3


def bench_a_plan_of_100_moves(benchmark, host):
    """Lower 100 rows to 3 bits and release, then bring them back: 200 moves, waits for their copies included."""
    arena = make_arena(host)
    engine = make_engine(arena)
    table = PageTable(LAYOUT, host.sizes, arena, engine.upload)
    pager = Pager(table, arena, host, engine)
    for bits in (2, 6):
        pager.start([Transition(row, int(table.committed[row]), bits, 0) for row in range(LAYOUT.rows)])
        pager.settle()
    rows = np.random.default_rng(0).permutation(LAYOUT.rows)[:100].tolist()

    def there_and_back() -> None:
        for start, end in ((6, 3), (3, 6)):
            moves = [Transition(row, start, end, 0) for row in rows]
            pager.lower(moves)
            table.publish()
            pager.start(moves)
            pager.settle()

    benchmark(there_and_back)
    table.check()
    assert (table.committed == 6).all()
    benchmark.extra_info.update(rows=LAYOUT.rows, moves=200, device=arena.memory.device.type)


def bench_32_raises_in_a_fragmented_arena(benchmark):
    """Gemma-4's 7,680 rows in small frames; KV stands in every second free one, so that frames move for every table."""
    layers, experts = (2, 4) if benchmark.disabled else (30, 128)
    layout = Layout(tuple(MoeLayer(at, experts, 64, 32) for at in range(layers)), WIDTHS, LAYOUT.codebooks)
    sizes = PageSizes.of(layout, np.ones(layout.rows, dtype=np.int64), 512)
    host = HostPages(sizes, None if torch.cuda.is_available() else 0)
    for row, (n, _) in enumerate(layout.row_shapes()):
        for plane in range(6):
            host.store(row, plane, torch.zeros(512, dtype=torch.uint8))
        for width in WIDTHS:
            host.store_table(row, width, torch.zeros(n, 2**width, dtype=torch.float16))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arena = Arena(2 * int(sizes.resident_bytes()[:, 1].sum()), 512, device)
    engine = make_engine(arena)
    table = PageTable(layout, sizes, arena, engine.upload)
    pager = Pager(table, arena, host, engine)
    pager.follow_kv(lambda sources, targets: None)
    for bits in (2, 3):
        pager.start([Transition(row, int(table.committed[row]), bits, 0) for row in range(layout.rows)])
        pager.settle()
    rows = np.random.default_rng(0).permutation(layout.rows)[:32].tolist()
    raising = [Transition(row, 3, 6, 0) for row in rows]

    def scattered() -> None:
        pager.settle()
        pager.lower([Transition(row, int(table.committed[row]), 3, 0) for row in rows if table.committed[row] > 3])
        table.publish()
        pager.start()
        pager.settle()
        arena.free(np.flatnonzero(arena.kinds == OwnerKind.KV))
        arena.free(arena.allocate(arena.free_frames, KV_OWNER)[::2])

    benchmark.pedantic(lambda: pager.start(raising), setup=scattered, rounds=1 if benchmark.disabled else 30)
    pager.settle()
    table.check()
    assert pager.moves.relocated_bytes > 0
    benchmark.extra_info.update(rows=layout.rows, frames=arena.frames, device=arena.memory.device.type)
    benchmark.extra_info.update(raised=int((table.committed == 6).sum()), deferred=pager.moves.deferred_rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("copy_streams", "batched"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize(("together", "pages"), [(1, 372), (3, 372), (1, 32), (1, 8)])
def bench_copy_in(benchmark, together, pages, copy_streams, batched):
    """704 KiB pages (a gate_up plane of Qwen1.5-MoE) to scattered 64 KiB frames, 256 MiB a batch, or as many as one
    boundary brings back.

    together: planes of a row that lie side by side in host memory, as 3 do when a row goes from 3 to 6 bits.
    """
    frame_bytes, frames_per_page, rows = 65536, 11, pages // together
    arena = Arena(2**16 * frame_bytes, frame_bytes, "cuda")
    engine = CudaEngine(arena, copy_streams=copy_streams, batched=batched)
    page_bytes = frames_per_page * frame_bytes
    host = torch.randint(0, 256, (rows, together * page_bytes + frame_bytes), dtype=torch.uint8).pin_memory()
    pages = [row[at * page_bytes : (at + 1) * page_bytes] for row in host for at in range(together)]
    frames = np.random.default_rng(0).permutation(2**16)[: len(pages) * frames_per_page].reshape(len(pages), -1)
    copies = [FrameCopy(*copy) for copy in zip(frames, pages, strict=True)]
    engine.copy_in(copies).wait()
    assert all(torch.equal(arena.rows[torch.from_numpy(c.frames).cuda()].cpu().view(-1), c.host) for c in copies[::37])
    benchmark(lambda: engine.copy_in(copies).wait())
    rate = len(pages) * page_bytes / benchmark.stats.stats.median / 1e9 if not benchmark.disabled else None
    benchmark.extra_info.update(gigabytes_per_second=rate, plain_gigabytes_per_second=plain_rate(host))
    landed = [engine.copy_in(copies) for _ in range(20)]
    engine.close()
    seconds = float(np.median([ticket.seconds() for ticket in landed]))
    benchmark.extra_info.update(from_first_to_last_byte_gigabytes_per_second=len(pages) * page_bytes / seconds / 1e9)


def plain_rate(host: torch.Tensor) -> float:
    """GB/s of one large copy from page-locked memory: what the bus gives."""
    target = torch.empty_like(host, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(host, non_blocking=True)
    start.record()
    for _ in range(4):
        target.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    return 4 * host.numel() / start.elapsed_time(end) / 1e6
