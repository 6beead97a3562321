import numpy as np
import pytest
import torch

from pagedweight.kernels.decode import assembly_spread
from pagedweight.kernels.decode.assembly import decoder_program, number_bias
from pagedweight.kernels.decode.assembly8 import byte_program, look_up_program, selector_program, spread_program
from pagedweight.kernels.device_order import stored_columns
from tests.kernels.decode.ptx_machine import float_halves, run_program

LANES = 16


def word_pair(bits: int, rng: np.random.Generator) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """(codes (lanes, 64) by column, planes [bit][word] of a block of two words), as device_order stores them."""
    codes = rng.integers(0, 1 << bits, (LANES, 64))
    stored = codes[:, stored_columns(64)].reshape(LANES, 2, 32)
    shifts = np.arange(32, dtype=np.uint64)
    planes = [
        (((stored >> (bits - 1 - p)) & 1).astype(np.uint64) << shifts).sum(-1, dtype=np.uint64) for p in range(bits)
    ]
    return codes, [[plane[:, word] for word in (0, 1)] for plane in planes]


def twice(half: np.ndarray) -> np.ndarray:
    return half.view(np.uint16).astype(np.uint64) * np.uint64(0x10001)


def to_bf16(values: np.ndarray) -> np.ndarray:
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def random_table(bits: int, codebook: str, bf16: bool, rng: np.random.Generator):
    """(values (lanes, 2^b) of every code, table operands, memory for the widths whose entries are loaded)."""
    middle, memory = 1 << (bits - 1), None
    if codebook == "lut16":
        entries = (rng.standard_normal((LANES, 1 << bits)) * 0.05).astype(np.float16)
        operands, memory = lut16_operands(entries, bits, bf16)
        values = entries.astype(float)
    elif codebook == "lut8":
        octets = rng.integers(0, 128, (LANES, 1 << bits)).astype(np.uint8)
        operands = list(octets.reshape(LANES, -1, 4).copy().view(np.uint32)[:, :, 0].T)
        operands = operands * 2 if bits == 2 else operands
        values = octets.astype(float) - 64
    else:
        count = 2 if codebook == "affine" else 4
        coefficients = (rng.standard_normal((count, LANES)) * 0.3).astype(np.float16)
        exact_bf16 = bf16 and codebook == "affine" and bits < 8
        operands = [twice(to_bf16(c) if exact_bf16 else c) for c in coefficients]
        u = np.arange(1 << bits) - middle
        values = np.zeros((LANES, 1 << bits))
        for coefficient in coefficients.astype(float):
            values = values * (u if codebook == "affine" else u / middle) + coefficient[:, None]
    return values, operands, memory


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("bits", "codebook"),
    [(b, k) for b in range(2, 9) for k in ("lut16", "lut8", "affine", "cubic") if not (k == "lut8" and b > 4)],
)
def test_decoder_gives_the_value_of_every_column(bits, codebook, bf16):
    rng = np.random.default_rng(bits)
    codes, planes = word_pair(bits, rng)
    values, operands, memory = random_table(bits, codebook, bf16, rng)
    if codebook == "affine":  # codes as they are: the line is the row's
        operands, code = [], np.arange(1 << bits) - (128 if bits == 8 else 0)
        values = np.tile(code.astype(float) + number_bias(bits, codebook, bf16), (LANES, 1))
    elif codebook == "lut8":
        values = values + 64 + number_bias(bits, codebook, bf16)
    inputs = {32 + 2 * p + w: planes[p][w] for p in range(bits) for w in (0, 1)}
    inputs |= {32 + 2 * bits + 2 * i + w: operand for i, operand in enumerate(operands) for w in (0, 1)}
    outputs = run_program(decoder_program(bits, codebook, bf16)[0], inputs, memory)
    decoded = np.stack([half for j in range(32) for half in float_halves(outputs[j], bf16)], 1)
    expected = np.take_along_axis(values, codes, 1)
    if codebook in ("lut8", "affine"):
        assert np.array_equal(decoded, expected)
    assert np.abs(decoded - expected).max() <= (1e-2 if bf16 else 2e-3) * np.abs(expected).max()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize("bits", [5, 6])
def test_spread_entries_are_read_back_by_every_lane_from_a_bank_of_its_own(bits, bf16):
    rng = np.random.default_rng(bits)
    entries = (rng.standard_normal((LANES, 1 << bits)) * 0.05).astype(np.float16)
    memory, base = entries.view(np.uint16).reshape(-1), 4096
    shared = np.zeros((base + (128 << bits)) // 2, np.uint16)
    eight, row = (index.reshape(-1) for index in np.indices(((1 << bits) // 8, 8)))
    copied = {1: row * (2 << bits) + 16 * eight, 3: base + 16 * row + 1024 * eight}
    run_program(assembly_spread.copy_program(bf16)[0], copied | {2: copied[1] + (16 << bits)}, memory, shared)
    codes, planes = word_pair(bits, rng)
    inputs = {32 + 2 * p + w: planes[p][w] for p in range(bits) for w in (0, 1)}
    first = base + np.arange(LANES) % 8 * 16 + np.arange(LANES) // 8 * 2
    banks = (first[:8, None] + 4 * np.arange(4)) // 4 % 32
    assert len(np.unique(banks)) == 32
    assert assembly_spread.STRIDE == 4 * 32, "no code changes a look-up's bank"
    for lane in range(4):
        operand = {32 + 2 * bits + w: first + 4 * lane for w in (0, 1)}
        outputs = run_program(assembly_spread.decoder_program(bits)[0], inputs | operand, None, shared)
        decoded = np.stack([half for j in range(32) for half in float_halves(outputs[j], bf16)], 1)
        expected = torch.from_numpy(entries).to(torch.bfloat16 if bf16 else torch.float16).double().numpy()
        assert np.array_equal(decoded, np.take_along_axis(expected, codes, 1))


def lut16_operands(entries: np.ndarray, bits: int, bf16: bool):
    """(table operands, memory for the widths whose entries are loaded)."""
    if bits > 4:
        return [np.arange(LANES) * (2 << bits)], entries.view(np.uint16).reshape(-1)
    halves = to_bf16(entries) if bf16 else entries.view(np.uint16)
    low, high = (
        (halves >> shift).astype(np.uint8).reshape(LANES, -1, 4).copy().view(np.uint32)[:, :, 0].T for shift in (0, 8)
    )
    repeat = 2 if bits == 2 else 1
    return [*low] * repeat + [*high] * repeat, None


@pytest.mark.parametrize(("bits", "codebook"), [(b, "lut8") for b in (2, 3, 4)] + [(b, "affine") for b in range(2, 9)])
def test_int8_bytes_come_from_the_stated_bits(bits, codebook):
    rng = np.random.default_rng(bits)
    # Four words of one row: operand registers hold byte i from word 4 m + i.
    _codes, planes = zip(*[word_pair(bits, rng) for _ in range(2)], strict=True)
    words = [[planes[w // 2][p][w % 2] for w in range(4)] for p in range(bits)]
    program = (selector_program if codebook == "lut8" else byte_program)(bits)[0]
    count = 16 if codebook == "lut8" and bits == 4 else 8
    made = [run_program(program, {count + p: words[p][w] for p in range(bits)}) for w in range(4)]
    if codebook == "affine":
        bytes_of = run_program(spread_program()[0], {32 + 4 * j + w: made[w][j] for j in range(8) for w in range(4)})
    else:
        octets = rng.integers(0, 128, (LANES, 1 << bits)).astype(np.uint8)
        table = list(octets.reshape(LANES, -1, 4).copy().view(np.uint32)[:, :, 0].T)
        table = table * 2 if bits == 2 else table
        inputs = {32 + 4 * s + w: made[w][s] for s in range(count) for w in range(4)}
        inputs |= {32 + 4 * (count + t): word for t, word in enumerate(table)}
        bytes_of = run_program(look_up_program(bits)[0], inputs)
    for number, word in bytes_of.items():
        group, w = divmod(number, 4)
        for part in range(4):
            bit = 16 * (group % 2) + 4 * part + group // 2 if codebook == "lut8" else 8 * part + group
            code = sum(((words[p][w] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(bits - 1 - p) for p in range(bits))
            expected = octets[np.arange(LANES), code.astype(int)] if codebook == "lut8" else code
            if codebook == "affine" and bits == 8:
                expected = code ^ np.uint64(128)
            assert np.array_equal((word >> np.uint64(8 * part)) & np.uint64(255), expected)
