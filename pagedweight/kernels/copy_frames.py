"""Frames copied by address: many pieces of device memory to as many others, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_frames_kernel(source_ptr, target_ptr, FRAME_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK 32-bit words of one frame.  Grid (frames, cdiv(FRAME_WORDS, BLOCK)).
    target[f][w] = source[f][w], where the tables hold the absolute address of every frame."""
    frame = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_ptr + frame).to(tl.pointer_type(tl.int32))
    target = tl.load(target_ptr + frame).to(tl.pointer_type(tl.int32))
    inside = offs < FRAME_WORDS
    tl.store(tl.multiple_of(target, 16) + offs, tl.load(tl.multiple_of(source, 16) + offs, mask=inside), mask=inside)


def launch_copy_frames(source: torch.Tensor, target: torch.Tensor, frame_bytes: int) -> None:
    """Copy frames of frame_bytes between absolute addresses, int64 (n,) each, on the current stream.

    Addresses are multiples of 16. A frame must not be both source and target. ValueError when the tables do not fit
    each other.
    """
    if source.shape != target.shape or source.dim() != 1 or {source.dtype, target.dtype} != {torch.int64}:
        raise ValueError(
            f"source is {source.dtype} {tuple(source.shape)} and target {target.dtype} {tuple(target.shape)}; "
            "give int64 addresses, as many of one as of the other"
        )
    if frame_bytes < 16 or frame_bytes % 16:
        raise ValueError(f"frame_bytes is {frame_bytes}; give a positive multiple of 16")
    if not len(source):
        return
    words = frame_bytes // 4
    block = min(4096, triton.next_power_of_2(words))
    _copy_frames_kernel[(len(source), triton.cdiv(words, block))](source, target, words, block, num_warps=8)
