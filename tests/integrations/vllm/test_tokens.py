"""Under vLLM on a CPU, tokens at a fixed width equal those of vLLM's own experts on the dequantized checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: see docs/vllm.md")

from tests.integrations.vllm.support import FAMILIES, ODD, paged, run, serve, write_dense, write_paged

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_vllms_own_experts(family: str, tmp_path: Path) -> None:
    folder, runs = write_paged(family, tmp_path / "paged"), []
    for bits in (2, 4):
        runs.append(run(write_dense(family, folder, bits, tmp_path / f"dense{bits}")))
        runs.append(run(folder, **paged(bits=bits)))
    dense2, paged2, dense4, paged4 = (found["tokens"] for found in serve(*runs))
    assert paged2 == dense2
    assert paged4 == dense4
    assert dense2 != dense4, "widths make no difference here, so nothing was tested"


def test_a_float_checkpoint_quantized_while_loading_equals_one_quantized_before(tmp_path: Path) -> None:
    folder = write_paged("odd", tmp_path / "paged")
    ODD["odd"]().save_pretrained(tmp_path / "float")
    before, now = serve(
        run(folder, **paged(bits=3)),
        run(tmp_path / "float", quantization="pagedweight", **paged(bits=3)),
    )
    assert before["tokens"] == now["tokens"]
