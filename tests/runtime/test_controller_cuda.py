"""The whole runtime on real streams: forwards that run late read exactly what they were promised."""

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedweight.layout import BlockTables, Layout, MoeLayer, RoutingStats
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.frames import Arena, OutOfFrames
from pagedweight.runtime.kv import ArenaGauge, CallableGauge, KVGauge, KVState
from pagedweight.runtime.pages import HostPages, PageSizes
from pagedweight.runtime.table_view import Transition
from pagedweight.runtime.transfer_cuda import CudaEngine
from tests.runtime.support import ForgetfulPages, random_policy

pytestmark = pytest.mark.gpu

WIDTHS = (2, 3, 4, 5, 6)
FRAME_BYTES = 4096
LAYOUT = Layout((MoeLayer(0, 16, 64, 32), MoeLayer(1, 16, 64, 32)), WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
FRAMES_PER_PLANE = 5
BLOCK_FRAMES = 16


class LateReader:
    """Forwards that start late and compare every page and table that the device tables name with the truth."""

    def __init__(self, host: HostPages, tables: BlockTables) -> None:
        rows = LAYOUT.rows
        pages = [host.page(row, plane) for row in range(rows) for plane in range(6)]
        self._pages = torch.stack(pages).view(rows, 6, FRAMES_PER_PLANE, FRAME_BYTES).cuda()
        first_frames = [host.table(row, width)[:FRAME_BYTES] for row in range(rows) for width in WIDTHS]
        self._first_frames = torch.stack(first_frames).view(rows, len(WIDTHS), FRAME_BYTES).cuda()
        self._tables = tables
        self._planes = torch.arange(6, device="cuda")
        self._rows = torch.arange(rows, device="cuda")
        self.errors = torch.zeros((), dtype=torch.int64, device="cuda")

    def forward(self) -> None:
        """Nothing here waits; errors are counted on the device."""
        torch.cuda._sleep(2_000_000)
        bits, frame_address, table_address, memory = self._tables
        rows = memory.view(-1, FRAME_BYTES)
        used = self._planes < bits[:, None]
        frames = torch.where(used[:, :, None], (frame_address - memory.data_ptr()) // FRAME_BYTES, 0)
        self.errors += ((rows[frames] != self._pages) & used[:, :, None, None]).sum()
        tables = rows[(table_address - memory.data_ptr()) // FRAME_BYTES]
        self.errors += (tables != self._first_frames[self._rows, bits.long() - 2]).sum()


def make_runtime(frames: int, gauge: KVGauge | None = None, **config: object) -> tuple[Runtime, HostPages]:
    sizes = PageSizes.of(LAYOUT, np.full(LAYOUT.rows, FRAMES_PER_PLANE), FRAME_BYTES)
    host = ForgetfulPages(sizes, None)
    for row, (n, _) in enumerate(LAYOUT.row_shapes()):
        for plane in range(6):
            host.store(row, plane, torch.randint(0, 256, (FRAMES_PER_PLANE * FRAME_BYTES,), dtype=torch.uint8))
        for width in WIDTHS:
            host.store_table(row, width, torch.randn(n, 2**width).half())
    arena = Arena(frames * FRAME_BYTES, FRAME_BYTES, "cuda")
    arena.memory.fill_(0xFF)
    settings = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=1, **config)
    stats = RoutingStats.zeros(1, 2, 16, "cuda")
    stats.mass.uniform_()
    engine, gauge = CudaEngine(arena), gauge or ArenaGauge(arena, BLOCK_FRAMES)
    return Runtime(LAYOUT, host, arena, random_policy(LAYOUT), settings, engine, gauge, stats), host


def test_case_72_hundreds_of_moves_under_late_forwards_leave_every_byte_right():
    runtime, host = make_runtime(2600)
    reader = LateReader(host, runtime.tables)
    rng, blocks, rescued = np.random.default_rng(0), [], 0
    for step in range(400):
        growing = step % 100 < 60
        runtime.boundary(pending_blocks=int(growing))
        reader.forward()
        for _ in range(int(rng.integers(0, 4))):
            if growing:
                try:
                    blocks.append(runtime.allocate_kv(BLOCK_FRAMES))
                except OutOfFrames:
                    rescued += 1
                    continue
                runtime.arena.rows[torch.from_numpy(blocks[-1]).pin_memory().cuda(non_blocking=True)] = 0xFF
            elif blocks:
                runtime.arena.free(blocks.pop(int(rng.integers(len(blocks)))))
    runtime.check()
    moves = runtime.snapshot().moves
    assert moves.lowered_rows > 200, moves
    assert moves.raised_rows > 200, moves
    assert int(reader.errors) == 0
    runtime.close()


def test_a_boundary_does_not_wait_for_the_device():
    runtime, host = make_runtime(2700, plan_period_steps=2)
    reader = LateReader(host, runtime.tables)
    runtime.boundary()
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = []
        for step in range(40):
            if step < 20:
                taken.append(runtime.allocate_kv(min(40, runtime.arena.free_frames)))
            else:
                runtime.arena.free(taken.pop())
            runtime.boundary()
            reader.forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    moves = runtime.snapshot().moves
    assert moves.lowered_rows > 0, moves
    assert int(reader.errors) == 0
    runtime.close()


def test_case_67_pages_that_move_on_a_thread_stand_still_while_a_graph_is_captured():
    """Boundaries on a thread lower rows as long as there are any; this thread raises them all, pauses and captures."""
    # A reading that stays as it is would be taken for one that does not know yet what was released.
    pending = itertools.cycle(range(1, 4))
    gauge = CallableGauge(lambda: KVState(0, 20 * FRAME_BYTES, pending_blocks=next(pending)))
    runtime, _ = make_runtime(4000, gauge=gauge, plan_period_steps=1)
    ending, failures, moved = threading.Event(), [], [0]

    def boundaries() -> None:
        try:
            while not ending.is_set():
                runtime.boundary()
                moved.append(runtime.snapshot().moves.lowered_rows)
        except (RuntimeError, AssertionError) as error:
            failures.append(error)

    thread = threading.Thread(target=boundaries)
    thread.start()
    output = torch.zeros(LAYOUT.rows, dtype=torch.int32, device="cuda")
    try:
        for _ in range(5):
            runtime.set_bits(6)
            seen, deadline = moved[-1], time.monotonic() + 20
            while moved[-1] == seen:
                assert thread.is_alive(), failures
                assert time.monotonic() < deadline
            runtime.pause()
            standing = runtime.snapshot().moves.lowered_rows
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output.copy_(runtime.tables.bits)
            assert runtime.snapshot().moves.lowered_rows == standing
            runtime.resume()
    finally:
        ending.set()
        thread.join()
    assert not failures
    graph.replay()
    assert output.tolist() == runtime.snapshot().bits.tolist()
    runtime.check()
    runtime.close()


def test_a_boundary_inside_a_capture_does_nothing():
    """As in a model whose whole forward is captured, its hooks included."""
    runtime, _ = make_runtime(4000, gauge=CallableGauge(lambda: KVState(0, 40 * FRAME_BYTES)))
    runtime.boundary()
    assert not runtime.idle
    seen, graph = runtime.snapshot(), torch.cuda.CUDAGraph()
    output = torch.zeros(LAYOUT.rows, dtype=torch.int32, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(5):
            runtime.boundary()
        output.copy_(runtime.tables.bits)
    assert runtime.snapshot().moves.lowered_rows == seen.moves.lowered_rows > 0
    runtime.boundary()
    graph.replay()
    assert output.tolist() == runtime.snapshot().bits.tolist()
    runtime.check()
    runtime.close()


def test_case_73_a_page_is_handed_out_only_when_its_write_back_is_complete():
    runtime, host = make_runtime(3200)
    runtime.set_bits(6)
    host.forget(4, 4)
    runtime.set_bits(2)  # its write-back loads the kernels, which would wait for the device
    runtime.set_bits(6)
    truth = host.page(5, 4).clone()
    host.forget(5, 4)
    host.reserve(5, 4).fill_(0)
    torch.cuda._sleep(1_000_000_000)  # the copy cannot be over when it is asked for, however late the host comes
    runtime._pager.lower([Transition(5, 6, 2, 0)])
    runtime._table.publish()
    runtime._pager.start()
    runtime._pager.collect()
    assert host.page(5, 4) is None
    runtime.set_bits(2)
    assert torch.equal(host.page(5, 4), truth)
    runtime.set_bits(6)
    reader = LateReader(host, runtime.tables)
    reader.forward()
    assert int(reader.errors) == 0
    runtime.close()


def test_case_78_the_process_stays_as_large_over_fifty_cycles():
    runtime, _ = make_runtime(3200)
    resident = []
    for _ in range(55):  # the first five load the kernels
        runtime.set_bits(2)
        runtime.set_bits(6)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert max(resident[7:]) <= 1.05 * resident[7], resident
    assert runtime.snapshot().moves.lowered_rows >= 50 * LAYOUT.rows
    runtime.close()
