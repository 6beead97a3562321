"""A little of the soak's traffic; scripts/soak.py serves it for as long as one likes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the hf extra")

from tests.e2e.test_pressure import tight
from tests.fuzz.traffic import Traffic, Truth


def test_traffic_leaves_table_pages_and_answers_as_they_were() -> None:
    counts: Counter[str] = Counter()
    traffic = Traffic(tight("M8"), np.random.default_rng(5), counts)
    before = traffic.answers(3)
    for _ in range(100):
        traffic.step()
    assert traffic.answers(3) == before
    assert traffic.answers(4) != before
    traffic.leave()
    assert counts["forwards"] > 60
    assert counts["requests"] > 3
    assert traffic.paged.snapshot().moves.lowered_rows > 0
    assert traffic.paged.snapshot().kv_bytes == 0


def test_one_wrong_byte_of_a_page_or_a_table_is_seen() -> None:
    model = tight("M8")
    truth, memory = Truth(model), model.pagedweight.arena.memory
    tables = next(m for m in model.modules() if hasattr(m, "tables")).tables
    base = memory.data_ptr()
    for address in (tables.frame_address[3, 1, 0], tables.table_address[-1]):
        truth.check()
        memory[int(address) - base + 7] ^= 1
        with pytest.raises(AssertionError):
            truth.check()
        memory[int(address) - base + 7] ^= 1
    tables.bits[5] -= 1
    with pytest.raises(AssertionError):
        truth.check()
