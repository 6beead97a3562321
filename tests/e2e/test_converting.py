"""convert(): other tables, the same values; and one sentence where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from typer.testing import CliRunner

import pagedweight
from pagedweight.bitplane import table_values
from pagedweight.checkpoint import Checkpoint
from pagedweight.cli.main import app
from pagedweight.saving_convert import convert
from tests.hf_models import mixtral_m8, tokens

FROM = {2: "affine", 3: "lut8", 4: "cubic"}


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = mixtral_m8(num_local_experts=3, intermediate_size=32)
    folder = tmp_path_factory.mktemp("paged") / "model"
    return pagedweight.quantize(model, folder, widths=(2, 3, 4), codebooks=FROM)


def test_any_codebook_converts_to_lut16_with_the_same_planes_and_values(paged: Path, tmp_path: Path) -> None:
    steps = []
    out = convert(paged, tmp_path / "out", dict.fromkeys(FROM, "lut16"), progress=lambda *step: steps.append(step))
    before, after = Checkpoint.open(paged), Checkpoint.open(out)
    after.verify()
    assert set(after.layout.codebooks.values()) == {"lut16"}
    assert steps[-1] == ("convert", after.layout.rows, after.layout.rows)
    for block in after.layout.blocks():
        old, new = before.block(block), after.block(block)
        assert torch.equal(old.planes, new.planes)
        for bits in FROM:
            assert torch.equal(table_values(old.tables[bits], bits).half(), new.tables[bits])
    others = {path.name: path.read_bytes() for path in paged.iterdir() if path.is_file()}
    assert others == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    policy = "pagedweight/policy.safetensors"
    assert (out / policy).read_bytes() == (paged / policy).read_bytes()
    ids = tokens(1, 6)
    with torch.no_grad():
        wanted, got = (pagedweight.load(folder)(ids).logits for folder in (paged, out))
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


def test_bad_input_is_named_before_anything_is_written(paged: Path, tmp_path: Path) -> None:
    for codebooks, said in (
        ({6: "lut16"}, "no width 6"),
        ({3: "lut8", 4: "affine"}, "cubic to affine at 4 bits"),
        ({2: "x"}, "affine to x"),
    ):
        with pytest.raises(ValueError, match=said):
            convert(paged, tmp_path / "out", codebooks)
    with pytest.raises(ValueError, match="the checkpoint itself"):
        convert(paged, paged, {2: "lut16"})
    assert not (tmp_path / "out").exists()


def test_a_dense_model_is_not_written_over(paged: Path, tmp_path: Path) -> None:
    mixtral_m8(num_local_experts=2, intermediate_size=32).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds a dense model, whose weights would be lost"):
        convert(paged, tmp_path, {2: "lut16"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_command_converts_and_refuses_in_one_sentence(paged: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["convert", str(paged), str(tmp_path / "out"), "--codebook", "4=lut16", "--json"])
    assert good.exit_code == 0, good.output
    assert Checkpoint.open(tmp_path / "out").layout.codebooks[4] == "lut16"
    bad = runner.invoke(app, ["convert", str(paged), str(tmp_path / "bad"), "--codebook", "4=affine"])
    assert bad.exit_code == 2
    assert len(bad.output.strip().splitlines()) == 1
