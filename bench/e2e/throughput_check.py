"""Whether captured steps of a patched model answer as the dense model of the same weights does."""

from __future__ import annotations

import json

import numpy as np
import torch

from bench.e2e.captured import CapturedDecoding
from bench.e2e.drawn import Drawn
from bench.e2e.throughput_rows import Setting, without_hooks
from pagedweight.kernels.device_order import plane_geometry, stored_columns
from pagedweight.kernels.reference import decode_blocks
from pagedweight.layout import Projection

EXPERTS_AT_ONCE = 4
ERROR_LIMIT = 2e-2  # of the largest logit, in bf16


def answers(drawn: Drawn, batches: list[int], setting: Setting) -> list[dict]:
    """Of a model of one layer, at mixed and uniform widths: how far captured steps are from the dense twin's.

    control: the same answer's distance from the twin at the widths before.
    """
    widths = drawn.store.layout.widths
    model = without_hooks(drawn, widths[-1])
    mixed, rows = np.random.default_rng(0).choice(widths, drawn.store.layout.rows), []
    for batch in batches:
        decoding, before = setting.decoding(model, batch), None
        for kind, bits in [("mixed", mixed)] + [(str(b), np.full_like(mixed, b)) for b in widths]:
            with model.pagedweight.held_at(bits):
                got, wanted = step_logits(decoding), twin_logits(drawn, decoding)
            row = {"batch": batch, "widths": kind, "error": error_of(got, wanted)}
            row |= {"ok": row["error"] <= ERROR_LIMIT}
            row |= {} if before is None else {"control": error_of(got, before)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            before = wanted
    return rows


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

    Of a model of one layer, compiled where the step is: rounding may send a token to other experts, deeper in a model
    in any implementation, and already there where the norm before the router is fused in one of the two.
    """
    model, at = drawn.model, drawn.found[0].path
    paged = model.get_submodule(at)
    decoding.restart(1)
    drawn.found[0].put_weights(*dense_weights(drawn))
    drawn.found[0].restore(model)
    try:
        return decoding.next_logits()
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
