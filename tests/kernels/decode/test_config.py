import pytest

from pagedweight.kernels.decode.config import GENERIC, H200_ROWS, Hardware, Workload, choose, problem
from pagedweight.kernels.decode.room import shared_problem

SHAPES = {
    "qwen": (60, 4, 2048, 1408),
    "mixtral": (8, 2, 4096, 14336),
    "gemma": (128, 8, 2816, 704),
    "tiny": (4, 2, 64, 32),
}
FORMATS = [
    ((2, 3, 4, 5, 6), ("lut16",) * 5),
    ((2, 3, 4, 5, 6), ("lut8", "lut8", "lut8", "affine", "affine")),
    ((2, 3, 4), ("lut8",) * 3),
    ((2, 3), ("lut8",) * 2),
    ((4,), ("lut8",)),
    ((8,), ("cubic",)),
    ((5, 6), ("lut16",) * 2),
    ((7,), ("lut16",)),
]


def workloads():
    for experts, choices, hidden, intermediate in SHAPES.values():
        for tokens in (1, 2, 3, 16, 17, 64):
            for widths, codebooks in FORMATS:
                yield Workload(tokens, choices, experts, hidden, intermediate, widths, codebooks)


@pytest.mark.parametrize("shared_bytes", [101376, 65536, 232448])
def test_every_choice_is_legal_case_60(shared_bytes):
    hardware = Hardware(shared_bytes, early_launch=True)
    for work in workloads():
        assert problem(choose(work, hardware), work, hardware) is None, work


def test_every_row_serves_some_workload():
    served = [next(row for row in H200_ROWS if row.serves(work)) for work in workloads()]
    assert all(any(row is other for other in served) for row in H200_ROWS)


def test_unknown_hardware_gets_no_early_launch():
    assert not any(choose(work, GENERIC).early_launch for work in workloads())


def test_tables_go_to_shared_memory_where_a_launch_gets_it():
    assert shared_problem(47 * 1024, 1024, 99 * 1024) is None
    assert "Triton asks for none" in shared_problem(48 * 1024, 1024, 99 * 1024)
    assert shared_problem(48 * 1024 + 512, 1024, 99 * 1024) is None
    assert "are there" in shared_problem(98 * 1024, 2048, 99 * 1024)
    assert "may reserve 49152" in shared_problem(64 * 1024, 64 * 1024, 227 * 1024)
    work = Workload(16, 4, 60, 2048, 1408, (5, 6), ("lut16", "lut16"))
    assert choose(work, Hardware(48 * 1024, True)).spread
    assert not choose(work, Hardware(30 * 1024, True)).spread
    assert choose(work, Hardware(48 * 1024, True, int8_in_registers=False)).spread
    mixed = work._replace(widths=(4, 5))
    assert [choose(mixed, Hardware(99 * 1024, True, registers)).spread for registers in (True, False)] == [True, False]


def test_int8_operands_that_the_compiler_moves_count_as_shared_memory():
    """Triton 3.9 took 114688 bytes for these with three stages, of the 101376 that most GPUs grant."""
    work = Workload(64, 4, 60, 2048, 1408, (2, 3, 4, 5, 6), ("lut16",) * 5)
    assert [choose(work, Hardware(99 * 1024, True, registers)).down.stages for registers in (True, False)] == [3, 2]
    three = choose(work, Hardware(227 * 1024, True, False))
    assert "114688 bytes" in problem(three, work, Hardware(99 * 1024, True, False))
