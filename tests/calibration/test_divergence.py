"""Divergence from a reference: zero for the model itself, and what a plain computation says otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.calibration.divergence import diverge, take_reference
from pagedweight.calibration.text import Windows
from tests.hf_models import FAMILIES, mixtral_m8, tokens


def windows(padding: int = 0) -> Windows:
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[-1, 8 - padding :] = False
    return Windows(tokens(3, 8), mask, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_does_not_diverge_from_itself(family: str) -> None:
    model = FAMILIES[family]()
    same = diverge(model, take_reference(model, windows(), rows=2))
    np.testing.assert_allclose(same.kl, 0, atol=1e-6)
    np.testing.assert_array_equal(same.agreement, 1)
    assert np.isfinite(same.loss).all()


def test_a_changed_model_diverges_as_computed_by_hand() -> None:
    model, given = mixtral_m8(), windows(padding=3)
    inputs = {"input_ids": given.tokens, "attention_mask": given.mask.long(), "use_cache": False}
    with torch.no_grad():
        before = model(**inputs).logits.double().log_softmax(-1)
        reference = take_reference(model, given, rows=2)
        model.model.layers[0].mlp.experts.down_proj *= 1.5
        after = model(**inputs).logits.double().log_softmax(-1)
    measured = diverge(model, reference)
    for row, length in enumerate((8, 8, 5)):
        p, q = before[row, :length], after[row, :length]
        assert measured.kl[row] == pytest.approx((p.exp() * (p - q)).sum(1).mean().item(), rel=1e-3)
        assert measured.agreement[row] == pytest.approx((p.argmax(1) == q.argmax(1)).double().mean().item())
        chosen = q[:-1].gather(1, given.tokens[row, 1:length, None])
        assert measured.loss[row] == pytest.approx(-chosen.mean().item(), rel=1e-4)


def test_only_the_prediction_of_scored_tokens_counts() -> None:
    model, given = mixtral_m8(), windows()
    reference, scored = take_reference(model, given, rows=2), torch.zeros(3, 8, dtype=torch.bool)
    scored[0, 3], scored[1, 5:7], scored[2, 7] = True, True, True
    model.model.layers[0].mlp.experts.down_proj.data *= 1.5
    measured = diverge(model, reference, scored)
    with torch.no_grad():
        q = model(input_ids=given.tokens, use_cache=False).logits.double().log_softmax(-1)
    for row in range(3):
        (at,) = scored[row].nonzero(as_tuple=True)
        wanted = -q[row, at - 1].gather(1, given.tokens[row, at, None]).mean()
        assert measured.loss[row] == pytest.approx(wanted.item(), rel=1e-4)
    np.testing.assert_allclose(diverge(model, reference.one(1), scored[1:2]).kl, measured.kl[1:2], rtol=1e-3)


def test_logits_that_are_not_the_heads_are_refused() -> None:
    model = mixtral_m8()
    inner = model.forward

    def scaled(**inputs: object):
        output = inner(**inputs)
        output.logits = 3 * output.logits
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="changes its output head's logits"):
        take_reference(model, windows())
