"""A rank's part of a linear-block is the same part of the whole block's weights, at every width."""

from __future__ import annotations

import pytest
import torch

from pagedweight.bitplane import dequantize
from pagedweight.integrations.vllm.shares import ExpertShare
from pagedweight.layout import BlockId, Projection
from pagedweight.quant.model import quantize_block


@pytest.mark.parametrize(
    ("hidden", "intermediate", "ranks"),
    [
        (64, 96, 2),  # 48 columns a rank: not whole words
        (44, 64, 2),  # whole words
        (40, 12, 3),  # fewer columns than a word
    ],
)
def test_case_3_parts_of_two_ranks_join_to_the_whole(hidden: int, intermediate: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = {
        Projection.GATE_UP: torch.randn(2 * intermediate, hidden, generator=generator),
        Projection.DOWN: torch.randn(hidden, intermediate, generator=generator),
    }
    for projection, weight in whole.items():
        packed = quantize_block(weight, (2, 3, 6), codebooks={3: "lut8", 6: "affine"})
        block = BlockId(0, 0, projection)
        for bits in (2, 3, 6):
            parts = []
            for rank in range(ranks):
                share = ExpertShare(0, (0,), hidden, intermediate // ranks, "silu", rank, ranks)
                parts.append(dequantize(share.cut(block, packed), bits))
                assert parts[-1].shape == share.shape.shape(projection)
            expected = dequantize(packed, bits)
            if projection is Projection.DOWN:
                joined = torch.cat(parts, dim=1)
            else:
                gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
                joined = torch.cat([*gates, *ups])
            assert torch.equal(joined, expected)
