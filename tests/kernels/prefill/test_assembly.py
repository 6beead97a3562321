from itertools import product

import numpy as np
import pytest

from pagedweight.kernels.prefill.assembly import (
    STEPS,
    code_words,
    codes_program,
    number_bias,
    step_words,
    values_program,
)
from tests.kernels.decode.ptx_machine import float_halves, run_program
from tests.kernels.decode.test_assembly import random_table, word_pair


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("bits", "codebook"),
    [(b, k) for b in range(2, 9) for k in ("lut16", "lut8", "affine", "cubic") if not (k == "lut8" and b > 4)],
)
def test_pieces_give_the_value_of_every_column(bits, codebook, bf16):
    rng = np.random.default_rng(bits)
    codes, planes = word_pair(bits, rng)
    values, operands, memory = random_table(bits, codebook, bf16, rng)
    if codebook == "affine":  # codes as they are: the line is the row's
        operands, code = [], np.arange(1 << bits) - (128 if bits == 8 else 0)
        values = np.tile(code.astype(float) + number_bias(bits, codebook, bf16), (len(codes), 1))
    elif codebook == "lut8":
        values = values + 64 + number_bias(bits, codebook, bf16)
    words = [
        run_program(
            codes_program(bits, codebook)[0], {code_words(bits, codebook) + p: planes[p][w] for p in range(bits)}
        )
        for w in (0, 1)
    ]
    decoded = np.empty(codes.shape)
    for step, side, half in product(range(STEPS), (0, 1), (0, 1)):
        chosen = step_words(bits, codebook, step)
        inputs = {2 + 2 * i + w: words[w][number] for i, number in enumerate(chosen) for w in (0, 1)}
        first = 2 + 2 * len(chosen)
        inputs |= {first + 2 * i + w: operand for i, operand in enumerate(operands) for w in (0, 1)}
        outputs = run_program(values_program(bits, codebook, bf16, step, side, half)[0], inputs, memory)
        for number in (0, 1):
            column = 16 * side + 4 * step + 2 * half + number
            decoded[:, 2 * column], decoded[:, 2 * column + 1] = float_halves(outputs[number], bf16)
    expected = np.take_along_axis(values, codes, 1)
    if codebook in ("lut8", "affine"):
        assert np.array_equal(decoded, expected)
    assert np.abs(decoded - expected).max() <= (1e-2 if bf16 else 2e-3) * np.abs(expected).max()
