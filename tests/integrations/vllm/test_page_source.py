"""Pages that are drawn for timing have the form of any other, whatever dtype an engine makes the default meanwhile."""

from __future__ import annotations

import pytest
import torch

from pagedweight.integrations.vllm.page_source import draw_block
from pagedweight.layout import CODEBOOKS, table_bytes

WIDTHS = (2, 3, 4)


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_drawn_tables_have_the_bytes_of_their_codebook(codebook: str, default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        drawn = draw_block(48, 64, WIDTHS, dict.fromkeys(WIDTHS, codebook))
    finally:
        torch.set_default_dtype(before)
    for bits, table in drawn.tables.items():
        assert table.numel() * table.element_size() == table_bytes(codebook, 48, bits)
