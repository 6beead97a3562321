"""Routing that goes wrong somewhere leaves the rest, and what the planner is told, as they are."""

from __future__ import annotations

import numpy as np
import torch

from pagedweight import RuntimeConfig, patch
from pagedweight.runtime.observe import merge_requests
from tests.hf_models import mixtral_m8


def test_case_38_padding_rows_with_nan_weights_stay_alone() -> None:
    model = patch(mixtral_m8().eval(), config=RuntimeConfig())
    experts = next(module for module in model.modules() if type(module).__name__ == "PagedExperts")
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [0, 7], [0, 1], [0, 1], [0, 1]])
    weights = torch.full((8, 2), 0.5)
    clean, alone = experts(x, ids, weights), experts(x[:5], ids[:5], weights[:5])
    weights[5:] = torch.nan
    model.pagedweight.begin_requests(1)
    together = experts(x, ids, weights)
    assert torch.equal(together[:5], clean[:5])
    assert torch.allclose(together[:5], alone, rtol=1e-5, atol=1e-4), "products of another shape round otherwise"
    assert torch.isfinite(model.pagedweight.stats.mass).all()
    assert all(torch.isfinite(t).all() for t in merge_requests(model.pagedweight.stats)[:4])


def test_case_41_equal_router_scores_keep_the_models_own_choice() -> None:
    """The router stays the model's: with all scores equal the ids are whatever torch.topk says, patched or not."""
    dense = mixtral_m8().eval()
    paged = mixtral_m8().eval()
    for model in (dense, paged):
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.data.zero_()
    patch(paged, config=RuntimeConfig())
    tokens = torch.arange(10)[None]
    chosen = []
    for model in (dense, paged):
        with torch.no_grad():
            chosen.append(model(tokens, output_router_logits=True).router_logits)
    assert all(torch.equal(a, b) for a, b in zip(*chosen, strict=True))
    counts = paged.pagedweight.stats.counts[0].numpy()
    picked = torch.topk(torch.zeros(8), 2).indices.numpy()
    assert (np.flatnonzero(counts[0]) == np.sort(picked)).all()
