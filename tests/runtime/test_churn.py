"""Sequences that come, grow and go at random for a long time: bytes stay true, widths follow, nothing drifts."""

import time

import numpy as np
import pytest
import torch

from pagedweight.layout import Layout, MoeLayer
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller import Runtime
from pagedweight.runtime.pages import HostPages, PageSizes
from tests.runtime.support import FRAME_BYTES, TinyModel, tiny_runtime

BLOCK_FRAMES = 20
STEPS = 800
CONFIG = RuntimeConfig()


def gemma_like(layers: int = 3, experts: int = 16) -> TinyModel:
    """Planes of 16 and 8 frames, tables of 6 and 11 at the parent width: what 2816 x 704 takes in frames of 32 KiB."""
    widths = (2, 3, 4, 5, 6)
    moe_layers = tuple(MoeLayer(layer, experts, hidden=11, intermediate=3) for layer in range(layers))
    layout = Layout(moe_layers, widths, dict.fromkeys(widths, "lut16"))
    sizes = PageSizes.of(layout, np.tile([16, 8], layers * experts), FRAME_BYTES)
    host = HostPages(sizes)
    for row, (n, _) in enumerate(layout.row_shapes()):
        for plane in range(layout.parent_width):
            host.store(row, plane, torch.zeros(int(sizes.plane_frames[row]) * FRAME_BYTES, dtype=torch.uint8))
        for width in widths:
            host.store_table(row, width, torch.zeros(n * 2 * 2**width, dtype=torch.uint8))
    return TinyModel(layout, sizes, host, {}, {})


class Load:
    """Sequences that hold KV blocks of a runtime: each step some grow, some end, and now and then one comes."""

    def __init__(self, runtime: Runtime, seed: int, step_seconds: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.runtime = runtime
        self.step_seconds = step_seconds
        self.now = 0.0
        self.sequences: list[list[np.ndarray]] = []

    @property
    def frames(self) -> int:
        return BLOCK_FRAMES * sum(map(len, self.sequences))

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += self.step_seconds
        growing = [sequence for sequence in self.sequences if self.rng.random() < 0.3]
        if self.rng.random() < 0.1:
            self.sequences.append([])
            growing += [self.sequences[-1]] * int(self.rng.integers(1, 30))
        self.runtime.boundary(pending_blocks=len(growing))
        for sequence in growing:
            sequence.append(self.runtime.allocate_kv(BLOCK_FRAMES))
        ending = self.rng.random(len(self.sequences)) < 0.03
        self.end([sequence for sequence, ends in zip(self.sequences, ending, strict=True) if ends])

    def end(self, sequences: list[list[np.ndarray]]) -> None:
        for blocks in sequences:
            for frames in blocks:
                self.runtime.arena.free(frames)
        gone = set(map(id, sequences))
        self.sequences = [sequence for sequence in self.sequences if id(sequence) not in gone]


# Steps that have time for 8 raises each, and for all of them at once.
@pytest.mark.parametrize(("seed", "step_seconds"), [(0, 1e-3), (1, 1.0)])
def test_case_78_and_90_a_long_run_conserves_bytes_keeps_dwell_times_and_comes_back(
    seed: int, step_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gemma_like()
    frames = model.resident_frames(6) + 20 * BLOCK_FRAMES
    runtime = tiny_runtime(model, frames, CONFIG, block_frames=BLOCK_FRAMES)
    load = Load(runtime, seed, step_seconds)
    monkeypatch.setattr(time, "perf_counter", load.clock)
    host_bytes, bits, means = model.host.bytes, runtime.snapshot().bits, []
    changed_at = np.full(len(bits), -CONFIG.min_dwell_steps)
    for step in range(STEPS):
        load.step()
        seen = runtime.snapshot()
        assert sum(seen.bytes_by_owner.values()) == frames * FRAME_BYTES
        assert seen.kv_bytes == load.frames * FRAME_BYTES
        assert seen.shortfall_bytes == 0 or seen.kv.headroom_blocks <= CONFIG.offload_free_blocks
        assert (step - changed_at[seen.bits > bits] >= CONFIG.min_dwell_steps).all()
        changed_at[seen.bits != bits] = step
        bits = seen.bits
        means.append(seen.mean_bits)
    runtime.check()
    assert min(means) < 4, "there was hardly any pressure, so this shows little"
    assert model.host.bytes == host_bytes
    assert seen.moves.written_back_bytes == 0
    load.end(load.sequences)
    # At most 64 boundaries until room has lasted, and 30 in which the fewest rows rise.
    for _ in range(100):
        load.now += step_seconds
        runtime.boundary()
    assert (runtime.snapshot().bits == 6).all()
    assert runtime.snapshot().moves.deferred_rows < 0.1 * runtime.snapshot().moves.raised_rows
    runtime.check()
