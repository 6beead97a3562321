"""Whether captured steps of a patched model answer as the dense model of the same weights does."""

from __future__ import annotations

import torch

from bench.e2e.captured import CapturedDecoding
from bench.e2e.drawn import Drawn
from pagedweight.kernels.device_order import plane_geometry, stored_columns
from pagedweight.kernels.reference import decode_blocks
from pagedweight.layout import Projection

EXPERTS_AT_ONCE = 4


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference of two sets of logits, over the largest wanted one."""
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def step_logits(decoding: CapturedDecoding) -> torch.Tensor:
    """(B, vocabulary) of the captured step."""
    decoding.restart(1)
    decoding.step()
    return decoding.logits.clone()


def twin_logits(drawn: Drawn, decoding: CapturedDecoding) -> torch.Tensor:
    """(B, vocabulary): the same step by transformers' own experts over the dequantized weights of the committed widths.

    Of a model of one layer: deeper, rounding may send a token to other experts, in any implementation.
    """
    model, at = drawn.model, drawn.found[0].path
    paged = model.get_submodule(at)
    decoding.restart(1)
    drawn.found[0].put_weights(*dense_weights(drawn))
    drawn.found[0].restore(model)
    try:
        with torch.no_grad():
            return model(
                input_ids=decoding.ids, past_key_values=decoding.cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
    finally:
        drawn.found[0].drop_weights()
        model.set_submodule(at, paged)


def dense_weights(drawn: Drawn) -> list[torch.Tensor]:
    """gate_up (E, 2I, H) and down (E, H, I) of the first layer, read back from the arena at the committed widths."""
    paged = drawn.model.get_submodule(drawn.found[0].path)
    dense = []
    for projection in Projection:
        geometry = plane_geometry(*paged.shape.shape(projection), paged.frame_bytes)
        position = torch.from_numpy(stored_columns(geometry.columns).argsort()[: geometry.columns].copy())
        rows = torch.arange(projection, 2 * paged.num_experts, 2).split(EXPERTS_AT_ONCE)
        blocks = [
            decode_blocks(paged.tables, part.to(drawn.model.device), geometry, drawn.store.layout.codebooks)
            .index_select(2, position.to(drawn.model.device))
            .to(drawn.model.dtype)
            for part in rows
        ]
        dense.append(torch.cat(blocks))
    return dense
