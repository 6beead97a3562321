"""Frames in KV blocks, for every layout in which engines keep keys and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.integrations.vllm.frame_sizes import choose_frame_bytes_for_kv
from pagedweight.integrations.vllm.kv_frames import BlockFrames

BLOCKS, HEADS, TOKENS, SIZE = 5, 2, 8, 16
BLOCK_BYTES = 2 * HEADS * TOKENS * SIZE


def layouts() -> dict[str, tuple[list[torch.Tensor], int]]:
    """By name, a cache of two layers, and the index of the dimension that counts blocks."""

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int8)

    shared = new(2, BLOCKS, 2 * HEADS, TOKENS, SIZE)
    outer = new(BLOCKS, 2, 2 * HEADS, TOKENS, SIZE)
    return {
        "keys before values": ([new(2, BLOCKS, TOKENS, HEADS, SIZE) for _ in range(2)], 1),
        "keys beside values": ([new(BLOCKS, 2, TOKENS, HEADS, SIZE) for _ in range(2)], 0),
        "heads before tokens in memory": ([new(2, BLOCKS, HEADS, TOKENS, SIZE).transpose(2, 3) for _ in range(2)], 1),
        "layers of one buffer": (list(shared), 0),
        "a block's layers together": ([outer[:, layer] for layer in range(2)], 0),
    }


@pytest.mark.parametrize("name", layouts())
def test_frames_of_a_block_lie_in_that_block_alone_and_fill_it(name: str) -> None:
    tensors, dim = layouts()[name]
    frame_bytes = 64
    frames = BlockFrames(tensors, BLOCKS, frame_bytes)
    assert frames.per_block == 2 * BLOCK_BYTES // frame_bytes
    for block in range(BLOCKS):
        for tensor in tensors:
            tensor.zero_()
        address = frames.address(np.full(frames.per_block, block), np.arange(frames.per_block))
        for start in address.tolist():
            write(start, frame_bytes)
        for tensor in tensors:
            written = tensor.movedim(dim, 0)
            assert (written[block] == 1).all(), "a byte of the block belongs to no frame"
            assert written.count_nonzero() == written[block].numel(), "a frame reaches into another block"


def test_two_groups_of_layers_over_the_same_bytes_count_once() -> None:
    buffer = torch.zeros(BLOCKS, 4096, dtype=torch.int8)
    wide, narrow = buffer.view(BLOCKS, 2, 8, 256), buffer.view(BLOCKS, 2, 16, 128)
    assert BlockFrames([wide, narrow], BLOCKS, 512).per_block == 8


def test_blocks_that_an_attention_backend_cuts_in_parts() -> None:
    tensor = torch.zeros(2, 4 * BLOCKS, HEADS, TOKENS, SIZE, dtype=torch.int8)
    frames = BlockFrames([tensor], BLOCKS, 4 * HEADS * TOKENS * SIZE)
    assert frames.per_block == 2


def test_a_frame_larger_than_a_piece_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="block_size"):
        BlockFrames([torch.zeros(BLOCKS, 64, dtype=torch.int8)], BLOCKS, 128)


@pytest.mark.parametrize(
    ("shapes", "piece_bytes", "expected"),
    [
        ([(2816, 2048), (2048, 1408)], 64 * 1024, 64 * 1024),  # Qwen1.5-MoE, blocks of 16 tokens
        ([(28672, 4096), (4096, 14336)], 32 * 1024, 32 * 1024),  # Mixtral-8x7B
    ],
)
def test_frames_divide_a_piece(shapes: list[tuple[int, int]], piece_bytes: int, expected: int) -> None:
    assert choose_frame_bytes_for_kv(shapes, piece_bytes) == expected


def test_a_piece_too_small_for_a_frame_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="larger block_size"):
        choose_frame_bytes_for_kv([(28672, 4096)], 4096)


def write(address: int, count: int) -> None:
    import ctypes

    ctypes.memset(address, 1, count)
