"""What is refused before anything is registered, and what of a user's options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.versions import activation_of, check_version


@pytest.mark.parametrize("version", ["0.20.1", "0.20.1+cpu", "0.27.0rc1", "0.32.0", "0.32", "0.33.0"])
def test_versions_that_are_served(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.19.9", "0.20.0", "0.34.0", "1.0.0", "dev"])
def test_case_96_one_sentence_for_a_version_that_is_not(version: str) -> None:
    with pytest.raises(ImportError, match=r"0\.20\.1 up to, but not including, 0\.34\.0"):
        check_version(version)


@pytest.mark.parametrize(
    ("named", "meant", "served"),
    [("gelu", "gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu", "gelu"), ("silu", None, "silu")],
)
def test_the_gelu_that_a_model_means_is_served(named: str, meant: str | None, served: str) -> None:
    text = SimpleNamespace(hidden_activation=meant) if meant else SimpleNamespace()
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
    assert activation_of(SimpleNamespace(activation=named), config) == served


def test_options_of_an_additional_config() -> None:
    assert ServingOptions.of({}) == ServingOptions() == ServingOptions.of({"other": 1})
    given = ServingOptions.of({"pagedweight": {"bits": 4, "codebooks": {"6": "affine"}}})
    assert given == ServingOptions(bits=4, codebooks={6: "affine"})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bit": 4}, "no option bit"),
        ({"bits": 4.5}, "bits"),
        ({"frame_bytes": 100}, "frame_bytes"),
        ({"widths": [1, 2]}, "widths"),
        ({"prefix_cache_by_precision": 1}, "prefix_cache_by_precision"),
        ({"reload_free_blocks": 8}, "larger"),
        ({"settle_steps": 0}, "settle_steps"),
        ({"codebooks": {"7": "lut16"}}, "codebooks"),
        ([], "object of options"),
    ],
)
def test_options_that_are_wrong_are_named(given: object, named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        ServingOptions.of({"pagedweight": given})
