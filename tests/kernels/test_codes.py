"""Decoding inside kernels: stored positions are the device order's, and weights are the tables' entries."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagedweight.kernels.codes import column_at, load_weights, position_of
from pagedweight.kernels.device_order import plane_geometry, stored_columns
from tests.support import DEVICE, draw_bits, make_layer


@triton.jit
def _positions_kernel(column_ptr, position_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = column_at(position, K)
    tl.store(column_ptr + position, column)
    tl.store(position_ptr + position, position_of(column, K), mask=column < K)


@triton.jit
def _decode_kernel(
    weights_ptr,
    frame_ptr,
    table_ptr,
    width,
    n,
    frames,
    stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS_PER_FRAME: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_word = tl.program_id(1) * WORDS
    table = tl.load(table_ptr).to(tl.pointer_type(tl.float16))
    weights = load_weights(
        frame_ptr, table, width, rows, rows < n, first_word, frames, K, BLOCK_N, WORDS, ROWS_PER_FRAME
    )
    position = first_word * 32 + tl.arange(0, 32 * WORDS)
    at = weights_ptr + rows[:, None] * stride + position[None, :]
    tl.store(at, weights, mask=(rows < n)[:, None] & (position < stride)[None, :])


@pytest.mark.parametrize("columns", [1, 44, 64, 130, 500, 512, 700, 1100])
def test_stored_positions_match_the_device_order(columns):
    stored = torch.from_numpy(stored_columns(columns).copy())
    column = torch.empty(len(stored), dtype=torch.int32, device=DEVICE)
    position = torch.full_like(column, -1)
    _positions_kernel[(len(stored) // 64,)](column, position, K=columns, BLOCK=64)
    column, position = column.cpu().long(), position.cpu().long()
    # Past K the two may name different columns: neither is used.
    assert torch.equal(column < columns, stored < columns)
    assert torch.equal(column[stored < columns], stored[stored < columns])
    assert torch.equal(position[stored < columns], torch.arange(len(stored))[stored < columns])


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        (40, 44, 2),  # K not a multiple of 32
        (50, 700, 8),  # a full column block and a tail that ends inside a step
        (16, 1024, 16),  # no tail
        (20, 970, 16),  # a tail as wide as a full block
    ],
)
def test_decoded_weights_are_the_tables_entries(rows, columns, words):
    layer = make_layer(1, rows, columns, (2, 5, 8))
    bits = draw_bits(layer)
    for width in layer.widths:
        bits[1] = width
        tables = layer.place(bits, padding=1)
        geometry = plane_geometry(rows, columns, layer.frame_bytes)
        stored = stored_columns(columns)
        weights = torch.full((rows, len(stored)), float("nan"), dtype=torch.float16, device=DEVICE)
        _decode_kernel[(-(-rows // 32), -(-geometry.words // words))](
            weights,
            tables.frame_address[1],
            tables.table_address[1:],
            width,
            rows,
            tables.frame_address.shape[2],
            len(stored),
            K=columns,
            BLOCK_N=32,
            WORDS=words,
            ROWS_PER_FRAME=geometry.rows_per_frame,
        )
        expected = torch.zeros(rows, len(stored), dtype=torch.float16)
        valid = torch.from_numpy(stored < columns)
        expected[:, valid] = layer.weight(1, width).half()[:, torch.from_numpy(stored[stored < columns])]
        assert torch.equal(weights.cpu(), expected)
