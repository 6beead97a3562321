"""A rank's part of a linear-block is the same part of the whole block's weights, at every width."""

from __future__ import annotations

import pytest
import torch

from pagedweight.bitplane import dequantize
from pagedweight.checkpoint import Checkpoint
from pagedweight.demo.run import CHECKPOINT
from pagedweight.integrations.vllm.page_source import CheckpointPages
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
                share = ExpertShare(0, (0,), 1, hidden, intermediate // ranks, "silu", rank, ranks)
                parts.append(dequantize(share.cut(block, packed), bits))
                assert parts[-1].shape == share.shape.shape(projection)
            expected = dequantize(packed, bits)
            if projection is Projection.DOWN:
                joined = torch.cat(parts, dim=1)
            else:
                gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
                joined = torch.cat([*gates, *ups])
            assert torch.equal(joined, expected)


@pytest.mark.parametrize("total", [15, 17])
def test_pages_of_another_number_of_experts_are_refused(total: int) -> None:
    pages = CheckpointPages(CHECKPOINT)
    moe = Checkpoint.open(CHECKPOINT).layout.moe_layers[0]
    share = ExpertShare(moe.layer, (0, 1), total, moe.hidden, moe.intermediate, moe.activation)
    with pytest.raises(ValueError, match=f"has experts, hidden.*{total}.*quantize this model again"):
        next(pages.blocks(share, pages.layout([share.shape]), None))
