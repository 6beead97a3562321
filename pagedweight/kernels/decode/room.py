"""Shared memory of a program: plane words and tokens under way, which are the compiler's, and tables beside them."""

from __future__ import annotations

from pagedweight.kernels.decode.assembly_spread import ROW_BYTES

# What every launch gets, and the most that a program may reserve by name. Triton asks for more where its own is more.
UNASKED_BYTES = 48 * 1024


def takes_room(codebook: str, bits: int) -> bool:
    """Whether a width's tables can be looked up in shared memory."""
    return codebook == "lut16" and bits in ROW_BYTES


def row_bytes(bits: int) -> int:
    """Of the table of one operand row."""
    return ROW_BYTES[bits]


def pipeline_stages(stages: int, bits: int, spread: bool, operand_rows: int) -> int:
    """A loop's depth. Where tables take as much as a step, a step less lets more programs be there; a large program's
    tables need the pipeline's bytes: `shared_problem`."""
    return max(stages - 1, 1) if spread and bits == 6 and operand_rows <= 32 else stages


def pipeline_bytes(stages: int, bits: int, operand_rows: int, columns: int, spread: bool) -> int:
    """Plane words and `columns` 16-bit columns of tokens: a pipeline keeps one step fewer under way than it has
    stages."""
    steps = max(pipeline_stages(stages, bits, spread, operand_rows) - 1, 1)
    return steps * (operand_rows * 64 * bits + 1024 * columns)


def moved_bytes(codebook: str, operand_rows: int) -> int:
    """An int8 operand of a step, where the compiler moves it through shared memory: a byte a weight, two of lut16."""
    return operand_rows * 512 * (2 if codebook == "lut16" else 1)


def shared_problem(pipeline: int, room: int, granted: int) -> str | None:
    """Why a launch cannot have both, in words, or None."""
    if room > UNASKED_BYTES:
        return f"{room} bytes of shared memory for tables; a program may reserve {UNASKED_BYTES}"
    if pipeline + room > granted:
        return f"{pipeline + room} bytes of shared memory; {granted} are there"
    if pipeline <= UNASKED_BYTES < pipeline + room:
        return f"{pipeline} bytes of shared memory, for which Triton asks for none, and {room} for tables"
    return None
