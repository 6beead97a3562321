"""Two widths by token: the ends are uniform widths, the share is met, and a token chooses for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.calibration.dynamic_pair import DynamicPair, high_share
from pagedweight.calibration.substitution import substituted
from pagedweight.discovery import find_experts
from pagedweight.layout import BlockId, PackedBlock
from tests.calibration.support import batch, blocks_of, layout_of
from tests.hf_models import mixtral_m8

LOW, HIGH = 2, 4


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return mixtral_m8().eval()


@pytest.fixture(scope="module")
def packed(model: torch.nn.Module) -> dict[BlockId, PackedBlock]:
    return blocks_of(model)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(batch(3, 12).tokens).logits


@pytest.mark.parametrize(("share", "bits"), [(0.0, LOW), (1.0, HIGH)])
def test_the_ends_are_uniform_widths(model, packed, share: float, bits: int) -> None:
    found, layout = find_experts(model), layout_of(model)
    pair = DynamicPair(found, packed.__getitem__, LOW, HIGH)
    pair.calibrate(lambda: logits(model), share)
    own = logits(model)
    with pair.installed():
        chosen = logits(model)
    assert pair.mean_bits == bits
    assert torch.equal(logits(model), own), "the model's own forward is back"
    with substituted(found, layout, packed.__getitem__) as weights:
        weights.write(np.full(layout.rows, bits))
        assert torch.allclose(chosen, logits(model), atol=1e-4)


def test_the_share_is_met_and_the_worst_tokens_take_the_higher_width(model, packed) -> None:
    """Half of the tokens at the higher width bring more than half of the way to it."""
    pair, answers = DynamicPair(find_experts(model), packed.__getitem__, LOW, HIGH), []
    for share in (0.0, high_share(LOW, HIGH, 3.0), 1.0):
        pair.calibrate(lambda: logits(model), share)
        with pair.installed():
            answers.append(logits(model))
        assert abs(pair.mean_bits - (LOW + share * (HIGH - LOW))) < 0.3
    low, between, high = answers
    assert (between - high).norm() < 0.85 * (low - high).norm()


def test_a_token_chooses_for_itself(model, packed) -> None:
    pair = DynamicPair(find_experts(model), packed.__getitem__, LOW, HIGH)
    pair.calibrate(lambda: logits(model), 0.5)
    experts = find_experts(model)[0]
    x = torch.randn(6, experts.shape.hidden)
    ids, weights = torch.tensor([[0, 1]]).expand(6, 2), torch.full((6, 2), 0.5)
    with pair.installed():
        together = experts.module(x, ids, weights)
        alone = torch.cat([experts.module(x[at : at + 1], ids[:1], weights[:1]) for at in range(6)])
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-3)


def test_pairs_and_shares_that_cannot_be_are_refused(model, packed) -> None:
    with pytest.raises(ValueError, match="lower one first"):
        DynamicPair(find_experts(model), packed.__getitem__, 4, 4)
    with pytest.raises(ValueError, match="cannot be had"):
        high_share(2, 4, 4.5)
