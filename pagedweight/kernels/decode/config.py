"""Launch settings of the two products, as data: what is legal, and what was measured to be fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pagedweight.kernels.decode.room import moved_bytes, pipeline_bytes, row_bytes, shared_problem, takes_room

MAX_TOKENS = 64
BYTE_CODEBOOKS = frozenset({"affine", "lut8"})
BLOCK_COLUMNS = 512


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

    int8: products on int8 tensor cores, for lut8, affine, and lut16 up to 4 bits. early_launch: each launch starts
    while the one before it ends (programmatic dependent launch). prepared: a launch before the products groups pairs
    and makes digits even for one token, which otherwise makes its own. separate_sum: a last
    launch adds up the parts of a token's output, instead of the down program that completes them. early_routing: that
    program asks for the token's ids and weights while it waits for h, at some registers more through its product.
    spread: 16-bit products look 16-bit tables of 5 and 6 bits up in shared memory (`spread.py`).
    """

    gate_up: ProductConfig
    down: ProductConfig
    tokens: int = 8
    int8: bool = False
    early_launch: bool = False
    prepared: bool = False
    separate_sum: bool = False
    early_routing: bool = False
    spread: bool = False

    def room_bytes(self, operand_rows: int, widths: tuple[int, ...], codebooks: tuple[str, ...]) -> int:
        """Shared memory for the tables of a program's operand rows."""
        rows = [row_bytes(bits) for bits, book in zip(widths, codebooks, strict=True) if takes_room(book, bits)]
        return operand_rows * max(rows) if rows and self.spread else 0


def takes_int8(codebook: str, bits: int) -> bool:
    """Whether a width's weights can be int8 operands: bytes, or entries of a 16-bit table that registers hold."""
    return codebook in BYTE_CODEBOOKS or (codebook == "lut16" and bits <= 4)


class Workload(NamedTuple):
    """What a launch is chosen for."""

    tokens: int
    choices: int
    experts: int
    hidden: int
    intermediate: int
    widths: tuple[int, ...]
    codebooks: tuple[str, ...]

    @property
    def pairs_per_expert(self) -> float:
        return self.tokens * self.choices / self.experts

    @property
    def int8(self) -> bool:
        """Whether int8 products serve a width."""
        return any(map(takes_int8, self.codebooks, self.widths))

    @property
    def only_int8(self) -> bool:
        """Whether int8 products serve every width."""
        return all(map(takes_int8, self.codebooks, self.widths))

    @property
    def only_room(self) -> bool:
        """Whether every width's tables can be looked up in shared memory."""
        return all(map(takes_room, self.codebooks, self.widths))

    @property
    def only_loads(self) -> bool:
        """Whether every weight is loaded from a table in global memory: lut16 above 6 bits."""
        return all(book == "lut16" and bits > 6 for book, bits in zip(self.codebooks, self.widths, strict=True))

    @property
    def large(self) -> bool:
        """Whether one expert's rows fill a GPU by themselves."""
        return self.hidden * self.intermediate >= 1 << 24

    @property
    def narrow(self) -> bool:
        """Whether the down launch has at most two steps."""
        return self.intermediate <= 2 * BLOCK_COLUMNS


class Hardware(NamedTuple):
    """What a GPU grants: shared memory of one program, programmatic dependent launch; and whether the compiler keeps
    int8 operands in registers, or moves them through shared memory."""

    shared_bytes: int
    early_launch: bool
    int8_in_registers: bool = True


GENERIC = Hardware(99 * 1024, False)  # what every GPU since Ampere grants


class Row(NamedTuple):
    """One row of a launch table: its settings serve workloads within all of its bounds.

    int8: only where int8 products serve a width; every: only where they serve all. room, loads: only where every
    weight is looked up in shared, or loaded from global memory. uniform: only for a single width.
    """

    config: DecodeConfig
    int8: bool = False
    every: bool = False
    room: bool = False
    loads: bool = False
    most_tokens: int = MAX_TOKENS
    least_pairs_per_expert: float = 0.0
    large: bool | None = None
    narrow: bool = False
    uniform: bool = False
    least_widest: int = 0

    def serves(self, work: Workload) -> bool:
        return (
            (work.int8 or not self.int8)
            and (work.only_int8 or not self.every)
            and (work.only_room or not self.room)
            and (work.only_loads or not self.loads)
            and work.tokens <= self.most_tokens
            and work.pairs_per_expert >= self.least_pairs_per_expert
            and self.large in (None, work.large)
            and (work.narrow or not self.narrow)
            and (len(work.widths) == 1 or not self.uniform)
            and work.widths[-1] >= self.least_widest
        )


_TWO_WARPS = ProductConfig(rows=16, warps=2)
_FEW_ROWS = ProductConfig(rows=8, chunks=2, warps=2)
_WHOLE_ROWS = ProductConfig(rows=64, splits=4)  # up to four steps: each program takes one, and loads it in one go


def _apart(gate_up: ProductConfig, down: ProductConfig, tokens: int, int8: bool = True) -> DecodeConfig:
    """For several tokens: a launch of its own for the sum takes 1 to 5 us less (Qwen, 16 and 64 tokens)."""
    return DecodeConfig(gate_up, down, tokens, int8, separate_sum=True, spread=True)


# The first row that serves is used. Measured on an H200, 2026-11: bench/results/h200-decode*.json.
H200_ROWS = (
    # 64.6 against 79.1 us with 16-bit products and 83.3 with digits made in place, Mixtral, 4 bits.
    Row(
        DecodeConfig(_TWO_WARPS, ProductConfig(rows=64, splits=2), tokens=1, int8=True, prepared=True),
        every=True, most_tokens=1, large=True, least_widest=5,
    ),
    # 59.6 against 65.2 us with the row above, Mixtral, 4 bits; 84.4 against 78.3 at 6. Frames cost nothing with it.
    Row(
        DecodeConfig(_TWO_WARPS, ProductConfig(rows=64, splits=4), tokens=1, int8=True, prepared=True),
        every=True, most_tokens=1, large=True,
    ),
    # Gemma, 4 bits: 19.6 us, against 22.7 with the last row below, 21.3 with 16 rows a program in gate_up, and 22.1
    # with early_routing, whose registers keep its programs from running all at once.
    Row(
        DecodeConfig(_FEW_ROWS, ProductConfig(rows=32, splits=2, warps=2), tokens=1),
        every=True, most_tokens=1, narrow=True, uniform=True, least_widest=4,
    ),
    # Several widths: 22.4 against 23.4 us with the row above and 23.7 with the last one; 21.5 with registers to spill
    # none.
    Row(
        DecodeConfig(replace(_FEW_ROWS, registers=168), ProductConfig(rows=16, splits=2, warps=1), tokens=1),
        every=True, most_tokens=1, narrow=True, least_widest=4,
    ),
    # Gemma, 3 bits: 15.9 against 17.2 us with the row below.
    Row(
        DecodeConfig(_FEW_ROWS, _WHOLE_ROWS, tokens=1, early_routing=True), every=True, most_tokens=1, narrow=True,
    ),
    Row(DecodeConfig(_FEW_ROWS, _WHOLE_ROWS, tokens=1), most_tokens=1, narrow=True),
    # 15.3 against 16.7 us, Qwen, 6 bits; 15.0 against 15.3, mixed.
    Row(DecodeConfig(_TWO_WARPS, _WHOLE_ROWS, tokens=1, int8=True), every=True, most_tokens=1, least_widest=5),
    # 14.3 against 14.9 us with the row below, Qwen, 4 bits; 12.3 against 12.1 at 3.
    Row(
        DecodeConfig(_FEW_ROWS, ProductConfig(rows=16, splits=4, warps=1), tokens=1),
        every=True, most_tokens=1, least_widest=4,
    ),
    Row(DecodeConfig(_FEW_ROWS, _WHOLE_ROWS, tokens=1), most_tokens=1),
    # Decoding an expert once for eight tokens: 125 against 146 us, Qwen, 64 tokens, 6 bits; 162 against 186, Mixtral,
    # 16 tokens, 3 bits. With 1.1 pairs an expert it loses: 99.9 against 74.0 us, Qwen, 16 tokens, 4 bits.
    Row(_apart(ProductConfig(), ProductConfig(rows=64), tokens=8), int8=True, least_pairs_per_expert=4),
    Row(_apart(ProductConfig(), ProductConfig(rows=64, splits=4), tokens=4), int8=True, large=True),
    # 74.0 against 76.5 us with four warps, Qwen, 16 tokens, 4 bits.
    Row(_apart(_TWO_WARPS, ProductConfig(rows=32, warps=2), tokens=4), int8=True),
    Row(_apart(ProductConfig(), ProductConfig(rows=64), tokens=8, int8=False), least_pairs_per_expert=2),
    # 112 and 124 against 192 and 208 us with four operand rows that share a table, lut16 at 5 and 6 bits.
    Row(_apart(_TWO_WARPS, ProductConfig(rows=32, warps=2), tokens=4, int8=False), room=True, large=False),
    # Four operand rows share a table: 209 against 271 us, Qwen, 16 tokens, lut16 at 6 bits before the row above.
    Row(_apart(ProductConfig(8, 4), ProductConfig(16, 4), tokens=2, int8=False), loads=True, large=False),
    Row(_apart(ProductConfig(), ProductConfig(rows=64), tokens=4, int8=False)),
)  # fmt: skip


@lru_cache(maxsize=256)
def choose(work: Workload, hardware: Hardware = GENERIC) -> DecodeConfig:
    """The settings for a workload: the table's, made to fit the matrices and the GPU."""
    row = next(row for row in H200_ROWS if row.serves(work))
    config = replace(row.config, early_launch=hardware.early_launch)
    steps = _steps(work.intermediate, config.down.chunks)
    config = replace(config, down=replace(config.down, splits=min(config.down.splits, steps)))
    spreads = config.spread and any(map(takes_room, work.codebooks, work.widths))
    spreads = spreads and (hardware.int8_in_registers or not config.int8)
    for spread in (spreads, False):
        for stages in range(config.gate_up.stages, 0, -1):
            up, down = replace(config.gate_up, stages=stages), replace(config.down, stages=stages)
            fitted = replace(config, gate_up=up, down=down, spread=spread)
            if problem(fitted, work, hardware) is None:
                return fitted
    return fitted


@lru_cache(maxsize=256)
def problem(config: DecodeConfig, work: Workload, hardware: Hardware) -> str | None:
    """Why a pair of launches cannot run, in words, or None."""
    gate_up, down = config.gate_up, config.down
    if config.tokens not in (1, 2, 4, 8, 16):
        return f"tokens is {config.tokens}; it must be a power of two up to 16"
    if config.int8 and not work.int8:
        return f"int8 products need affine, lut8, or lut16 of up to 4 bits; the codebooks are {work.codebooks}"
    prepared = config.prepared or work.tokens > 1
    if config.int8 and prepared and (max(gate_up.chunks, down.chunks) > 1 or config.tokens > 8):
        return "int8 products of prepared digits take whole rows and at most 8 tokens"
    if not prepared and config.tokens != 1:
        return f"tokens is {config.tokens}, but one token is not grouped; it must be 1"
    if gate_up.splits != 1:
        return f"the gate_up launch has {gate_up.splits} splits; its activation needs whole sums"
    steps = _steps(work.intermediate, down.chunks)
    if not 1 <= down.splits <= steps:
        return f"the down launch has {down.splits} splits of {steps} steps"
    columns = config.tokens * (2 if config.int8 else 1)
    moved = config.int8 and not hardware.int8_in_registers
    for name, product, rows in (("gate_up", gate_up, 2 * gate_up.rows), ("down", down, down.rows)):
        operand_rows = rows * product.chunks
        room = config.room_bytes(operand_rows, work.widths, work.codebooks)
        own = max(
            pipeline_bytes(
                product.stages, bits, operand_rows, product.chunks * config.tokens, room and takes_room(book, bits)
            )
            + (moved_bytes(book, operand_rows) if moved and takes_int8(book, bits) else 0)
            for bits, book in zip(work.widths, work.codebooks, strict=True)
        )
        reason = _product_problem(product, operand_rows, columns) or shared_problem(own, room, hardware.shared_bytes)
        if reason is not None:
            return f"the {name} launch cannot run with {product}: {reason}"
    return None


def _product_problem(product: ProductConfig, operand_rows: int, columns: int) -> str | None:
    if any(value < 1 or value & (value - 1) for value in (product.rows, product.chunks, product.warps)):
        return "rows, chunks and warps must be powers of two"
    if operand_rows != 16 * product.warps:
        return f"{operand_rows} operand rows are not 16 for each of {product.warps} warps"
    if product.chunks * columns > 16:
        return f"{product.chunks} chunks of {columns} columns are more than 16 operand columns"
    return None


def _steps(columns: int, chunks: int) -> int:
    return -(-columns // (BLOCK_COLUMNS * chunks))
