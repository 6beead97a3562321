"""Launch settings of the two products, as data: what is legal, and what was measured to be fast."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedweight.layout import CODEBOOKS

MAX_TOKENS = 64
INT8_CODEBOOKS = {"affine", "lut8"}
GENERIC_SHARED_BYTES = 99 * 1024  # what every GPU since Ampere grants one program


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How one launch cuts its rows.

    rows: matrix rows a program (of gate and of up each, in the first launch). chunks: operand rows a matrix row makes,
    each with every chunks-th column block. splits: programs that share a row's columns. warps, stages: Triton's
    num_warps and software pipelining depth. registers: most registers a thread may use; None leaves it to the compiler.
    """

    rows: int = 32
    chunks: int = 1
    splits: int = 1
    warps: int = 4
    stages: int = 3
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Both launches. tokens: most tokens of one expert that a program decodes weights for at once.

    int8: products on int8 tensor cores, for widths whose codebook is lut8 or affine. early_launch: each launch starts
    while the one before it ends.
    """

    gate_up: ProductConfig
    down: ProductConfig
    tokens: int = 8
    int8: bool = False
    early_launch: bool = False


def illegal(product: ProductConfig, columns: int, planes: int, operand_rows: int, shared_bytes: int) -> str | None:
    """Why a product cannot run, in words, or None. columns: operand columns of a chunk; planes: the
    widest width in the launch."""
    for name in ("rows", "chunks", "splits", "warps", "stages"):
        value = getattr(product, name)
        if value < 1 or (value & (value - 1) and name not in ("splits", "stages")):
            return f"{name} is {value}"
    if operand_rows < 16 or operand_rows < 16 * product.warps:
        return f"{operand_rows} operand rows do not fill {product.warps} warps of 16"
    if product.chunks * columns > 16:
        return f"{product.chunks} chunks of {columns} columns are more than 16 operand columns"
    # The pipeline keeps one step fewer in flight than it has stages.
    needed = max(product.stages - 1, 1) * (operand_rows * 64 * planes + 1024 * product.chunks * columns)
    if needed > shared_bytes:
        return f"{needed} bytes of shared memory; {shared_bytes} are there"
    return None


def problem(
    config: DecodeConfig, widths: tuple[int, ...], codebooks: tuple[str, ...], shared_bytes: int
) -> str | None:
    """Why a pair of launches cannot run, in words, or None."""
    if config.tokens < 1 or config.tokens & (config.tokens - 1):
        return f"tokens is {config.tokens}; it must be a power of two"
    if config.int8 and not set(codebooks) <= INT8_CODEBOOKS:
        return f"int8 products need the codebooks {' and '.join(sorted(INT8_CODEBOOKS))}; these are {codebooks}"
    columns = config.tokens * (2 if config.int8 else 1)
    parts = (
        ("gate_up", config.gate_up, 2 * config.gate_up.rows * config.gate_up.chunks),
        ("down", config.down, config.down.rows * config.down.chunks),
    )
    for name, product, operand_rows in parts:
        reason = illegal(product, columns, max(widths), operand_rows, shared_bytes)
        if reason is not None:
            return f"the {name} launch cannot run with {product}: {reason}"
    if config.gate_up.splits != 1:
        return f"the gate_up launch has {config.gate_up.splits} splits; its activation needs whole sums"
    return None


def choose(
    tokens: int, choices: int, experts: int, widths: tuple[int, ...], codebooks: tuple[str, ...]
) -> DecodeConfig:
    """The settings for T tokens of A choices each."""
    if tokens == 1:
        config = DecodeConfig(ProductConfig(rows=16, chunks=2), ProductConfig(rows=32, chunks=2), tokens=1)
    else:
        config = DecodeConfig(ProductConfig(rows=32), ProductConfig(rows=64), tokens=8)
    return fitted(config, widths, codebooks, GENERIC_SHARED_BYTES)


def fitted(
    config: DecodeConfig, widths: tuple[int, ...], codebooks: tuple[str, ...], shared_bytes: int
) -> DecodeConfig:
    """The same cut with as shallow a pipeline as the shared memory asks for."""
    while config.gate_up.stages > 1 and problem(config, widths, codebooks, shared_bytes) is not None:
        stages = config.gate_up.stages - 1
        config = replace(
            config, gate_up=replace(config.gate_up, stages=stages), down=replace(config.down, stages=stages)
        )
    return config


def check_codebooks(widths: tuple[int, ...], codebooks: tuple[str, ...]) -> None:
    """ValueError unless every width has a codebook these launches can decode."""
    if len(codebooks) != len(widths):
        raise ValueError(f"{len(widths)} widths have {len(codebooks)} codebooks; give one for each width")
    for bits, codebook in zip(widths, codebooks, strict=True):
        if codebook not in CODEBOOKS:
            raise ValueError(f"the codebook of width {bits} is {codebook!r}; use one of {', '.join(CODEBOOKS)}")
        if codebook == "lut8" and bits > 4:
            raise ValueError(f"width {bits} has codebook lut8; its bytes go up to 4 bits: use cubic or affine")
