"""Tuned tables: less divergence on text that was not seen, and the same bytes every time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedweight.calibration import tuning
from pagedweight.calibration.divergence import diverge, take_reference
from pagedweight.calibration.substitution import substituted
from pagedweight.calibration.text import Windows
from pagedweight.calibration.tuning import TuningOptions, tune_tables, tuned_widths, tuning_steps
from pagedweight.discovery import find_experts
from tests.calibration.support import WIDTHS, blocks_of, layout_of
from tests.hf_models import mixtral_m8, tokens

OPTIONS = TuningOptions(epochs=2, rows=4, rate=0.02)
MODEL = mixtral_m8(num_local_experts=3, intermediate_size=48)
BLOCKS = blocks_of(MODEL)


def windows(rows: int, seed: int, length: int = 24) -> Windows:
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, -5:] = False
    return Windows(tokens(rows, length, seed), mask, 0)


def tuned(**changes: object) -> dict:
    steps: list[int] = []
    tables = tune_tables(
        MODEL,
        find_experts(MODEL),
        layout_of(MODEL),
        BLOCKS.__getitem__,
        windows(24, seed=1),
        OPTIONS._replace(**changes),
        widths=(2,),
        advance=lambda: steps.append(1),
    )
    options = OPTIONS._replace(**changes)
    assert len(steps) == tuning_steps(layout_of(MODEL), windows(24, seed=1), options, widths=(2,))
    return tables


def divergence(tables: dict, bits: int) -> float:
    """Mean KL on other windows with every linear-block at a width."""
    found, layout = find_experts(MODEL), layout_of(MODEL)
    reference = take_reference(MODEL, windows(8, seed=2))
    blocks = {
        block: packed._replace(tables=packed.tables | {b: own[block] for b, own in tables.items()})
        for block, packed in BLOCKS.items()
    }
    with substituted(found, layout, blocks.__getitem__) as weights:
        weights.write(np.full(layout.rows, bits))
        return float(diverge(MODEL, reference).kl.mean())


def test_tuning_lowers_divergence_on_other_text_and_leaves_the_model_alone() -> None:
    before = [parameter.detach().clone() for parameter in MODEL.parameters()]
    wishes = [parameter.requires_grad for parameter in MODEL.parameters()]
    tables = tuned()
    assert all(torch.equal(a, b) for a, b in zip(before, MODEL.parameters(), strict=True))
    assert [parameter.requires_grad for parameter in MODEL.parameters()] == wishes
    assert set(tables) == {2}
    assert set(tables[2]) == set(BLOCKS)
    for block, table in tables[2].items():
        old = BLOCKS[block].tables[2]
        assert (table.dtype, table.shape) == (old.dtype, old.shape)
        assert table.isfinite().all()
    assert divergence(tables, 2) < 0.9 * divergence({}, 2)


def test_tuning_is_deterministic_whatever_is_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = tuned(), tuned(), tuned(seed=1)
    monkeypatch.setattr(tuning, "GROUP_WEIGHTS", 1)
    alone = tuned()
    for block, table in first[2].items():
        assert torch.equal(table, again[2][block])
        torch.testing.assert_close(table, alone[2][block], rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(table, other[2][block]) for block, table in first[2].items())


def test_steps_that_do_not_help_other_windows_are_not_taken() -> None:
    """Far too large ones, and those of a single window."""
    for tables in (tuned(rate=50.0, epochs=1)[2], tune_alone()[2]):
        for block, table in tables.items():
            torch.testing.assert_close(table, BLOCKS[block].tables[2], rtol=0, atol=0)


def tune_alone() -> dict:
    found, layout = find_experts(MODEL), layout_of(MODEL)
    return tune_tables(MODEL, found, layout, BLOCKS.__getitem__, windows(1, seed=1), OPTIONS, widths=(2,))


def test_the_gradient_of_a_table_is_the_sum_over_its_members() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    codes = torch.randint(0, 4, (3, 5, 11), generator=generator, dtype=torch.uint8)
    assert torch.autograd.gradcheck(lambda given: tuning._Lookup.apply(given, codes), values)


def test_only_16_bit_tables_of_low_widths_are_tuned() -> None:
    layout = layout_of(MODEL)
    assert tuned_widths(layout) == list(WIDTHS)
    mixed = replace(layout, widths=(2, 3, 4, 6), codebooks={2: "lut16", 3: "lut8", 4: "cubic", 6: "lut16"})
    assert tuned_widths(mixed) == [2]
