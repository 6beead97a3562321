"""What one rank does at a boundary: frames, tables and widths as the engine's commands say, on the compute stream."""

from __future__ import annotations

import numpy as np
import torch

from pagedweight.integrations.vllm.commands import FrameMoves, FrameSpots, StepCommands, Widths
from pagedweight.integrations.vllm.frame_copies import FrameCopies, PageLoad
from pagedweight.integrations.vllm.kv_frames import BlockFrames
from pagedweight.integrations.vllm.resident import ResidentWeights
from pagedweight.layout import table_bytes
from pagedweight.runtime.pages import HostPages


class RankPager:
    """Carries commands out; decides nothing. Every verb is ordered with the forwards before and after it."""

    def __init__(self, weights: ResidentWeights, host: HostPages, frames: BlockFrames, copies: FrameCopies) -> None:
        self._weights = weights
        self._host = host
        self._frames = frames
        self._copies = copies
        self.bits = np.full(weights.layout.rows, weights.resident_width, dtype=np.int64)
        self._address = weights.tables.frame_address.cpu().numpy().copy()
        self._table_address = weights.resting_address.copy()

    def carry_out(self, commands: StepCommands) -> None:
        """One boundary. After it kernels see the new widths, and nothing reads blocks that were given up."""
        changed: list[np.ndarray] = []
        if commands.rounds or len(commands.raised.row):
            # What is on its way comes before what reads it, before frames that move to where an abandoned load went,
            # and before the KV cache that may have such a block in this step.
            self._copies.join()
        if len(commands.raised.row):
            changed.append(self._commit(commands.raised))
        for lower, moves in commands.rounds:
            changed += [self._commit(lower), self._move(moves)]
        if changed:
            self._publish(np.unique(np.concatenate(changed)))
        if commands.loads:
            self._load(commands.loads)

    def check(self) -> None:
        """Assert that every plane in use on the device is the host's, byte for byte, and that tables say so."""
        self._copies.join()
        weights = self._weights
        tables = [tensor.cpu().numpy() for tensor in weights.tables[:3]]
        assert (tables[0] == self.bits).all()
        assert (tables[2] == self._table_address).all()
        for row, bits in enumerate(self.bits.tolist()):
            used = slice(weights.resident_width, bits), slice(int(weights.plane_frames[row]))
            address = tables[1][row][used]
            assert (address == self._address[row][used]).all(), row
            if address.size:
                held = self._copies.read(address.ravel()).view(len(address), -1)
                for plane, page in enumerate(held, weights.resident_width):
                    assert torch.equal(page, self._host.page(row, plane)), (row, plane)

    def _commit(self, widths: Widths) -> np.ndarray:
        """Rows at their new widths with the tables of these in their slots."""
        for row, bits in zip(widths.row.tolist(), widths.bits.tolist(), strict=True):
            if bits != self.bits[row]:
                self._table_address[row] = self._write_table(row, bits)
        self.bits[widths.row] = widths.bits
        return widths.row

    def _write_table(self, row: int, bits: int) -> int:
        """The table of a width where kernels will find it; the resident width's has its own place."""
        weights = self._weights
        if bits == weights.resident_width:
            return int(weights.resting_address[row])
        size = table_bytes(weights.layout.codebooks[bits], weights.geometries[row].rows, bits)
        return weights.write_slot(row, self._host.table(row, bits)[:size])

    def _move(self, moves: FrameMoves) -> np.ndarray:
        row, plane, frame, block, position = moves.frames
        if len(row):
            target = self._frames.address(block, position)
            self._copies.move(self._frames.address(moves.block, moves.position), target)
            self._address[row, plane, frame] = target
        return row

    def _load(self, spots: FrameSpots) -> None:
        """Start loading; the addresses become the row's with the width that needs them."""
        row, plane, frame, block, position = spots
        address = self._frames.address(block, position)
        self._address[row, plane, frame] = address
        by_page = np.lexsort((frame, plane, row))
        row, plane, address = row[by_page], plane[by_page], address[by_page]
        first = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(plane, prepend=-1) != 0))
        pages = [
            PageLoad(self._host.page(int(row[at]), int(plane[at])), own)
            for at, own in zip(first, np.split(address, first[1:]), strict=True)
        ]
        self._copies.load(pages)

    def _publish(self, rows: np.ndarray) -> None:
        """Write rows into the device tables; nothing waits."""
        tables = self._weights.tables
        frames = self._address[rows].reshape(len(rows), -1)
        packed = torch.from_numpy(np.column_stack([rows, self.bits[rows], self._table_address[rows], frames]))
        device = tables.bits.device
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        index, bits, table_address, frame_address = packed.split([1, 1, 1, frames.shape[1]], dim=1)
        index = index.squeeze(1)
        tables.frame_address.index_copy_(0, index, frame_address.unflatten(1, self._address.shape[1:]))
        tables.table_address.index_copy_(0, index, table_address.squeeze(1))
        tables.bits.index_copy_(0, index, bits.squeeze(1).int())
