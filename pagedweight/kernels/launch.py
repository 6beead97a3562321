"""Launch settings: codebooks as an op takes them, what a launch may choose, and the measured choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from pagedweight.layout import check_codebook

# Where kernels are interpreted, nothing limits a program.
INTERPRETED_SHARED_BYTES = 1 << 40
# What AMD's GPUs grant at the least; torch says it of NVIDIA's alone.
AMD_SHARED_BYTES = 1 << 16


def cdiv(number: int, divisor: int) -> int:
    """Rounded up. Triton's own cost the host a microsecond or two a call, and a launch has several."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The least one that is not below."""
    return 1 << (number - 1).bit_length()


def join_codebooks(codebooks: Mapping[int, str], widths: Sequence[int]) -> str:
    """Codebooks by width as the one string that fused_moe takes, since an op has no lists of strings."""
    return ",".join(codebooks[width] for width in widths)


def split_codebooks(joined: str, widths: Sequence[int]) -> tuple[str, ...]:
    """The codebook of every width; ValueError when there is not one for each, or one cannot serve its width."""
    return _split(joined, tuple(widths))


@lru_cache(maxsize=64)
def _split(joined: str, widths: tuple[int, ...]) -> tuple[str, ...]:
    codebooks = tuple(joined.split(","))
    if len(codebooks) != len(widths):
        raise ValueError(f"codebooks is {joined!r} for widths {widths}; give one for each width")
    for codebook, width in zip(codebooks, widths, strict=True):
        check_codebook(codebook, width)
    return codebooks


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Tile sizes of the grouped kernels, each a power of two.

    block_m: pairs per tile. block_n: weight rows per tile (gate_up splits them between gate and up).
    words: 32-column words per step of the reduction.
    """

    block_m: int = 16
    block_n: int = 64
    words: int = 2
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "words", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value}; give a power of two")
        if min(self.block_m, self.block_n // 2, 16 * self.words) < 16:
            raise ValueError(
                f"block_m {self.block_m}, block_n {self.block_n}, words {self.words}: a tensor-core tile needs "
                "block_m >= 16, block_n >= 32, words >= 1"
            )
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}; give at least 1")


def shared_bytes(config: LaunchConfig, element_bytes: int) -> int:
    """An upper bound on the shared memory of one program: every stage's tokens and weights, and their words."""
    block_k = 32 * config.words
    tokens = config.num_stages * config.block_m * block_k * element_bytes
    # The decoded tile passes through shared memory once as an operand and once to change layout.
    weights = config.block_n * block_k * (element_bytes + 4)
    return tokens + weights


def is_legal(config: LaunchConfig, element_bytes: int, shared_limit: int) -> bool:
    """Whether a device that allows `shared_limit` bytes of shared memory per program can run this launch."""
    return shared_bytes(config, element_bytes) <= shared_limit


def choose(experts: int, pairs: int, element_bytes: int, shared_limit: int) -> LaunchConfig:
    """The launch for a batch of T * A pairs; ValueError when the device allows none."""
    # H200, Qwen1.5-MoE and Mixtral at 4 bits, 2026-11: two words per step beat four by 1.4x at 64 x 128 (the decode's
    # registers); 64 tokens per tile beat 16 from about 8 pairs per expert on; 128 lost to 64 up to 512 tokens.
    few = LaunchConfig(block_m=16, block_n=64, words=2)
    many = LaunchConfig(block_m=64, block_n=128, words=2, num_warps=8)
    for config in (many if pairs > 8 * experts else few, few, LaunchConfig(block_n=32, words=1, num_stages=1)):
        if is_legal(config, element_bytes, shared_limit):
            return config
    raise ValueError(
        f"the device allows {shared_limit} bytes of shared memory per program; the smallest launch needs "
        f"{shared_bytes(config, element_bytes)}"
    )


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return INTERPRETED_SHARED_BYTES
    if torch.version.hip is not None:
        return AMD_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
