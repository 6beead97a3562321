"""`pagedweight bench` times every width and batch of a folder."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the hf extra")

from pagedweight.cli.main import app
from tests.hf_models import quantized_folder

RUNNER = CliRunner()
QUICK = ("--prompt", "4", "--steps", "2", "--device", "cpu", "--dtype", "float32")


def test_every_width_and_batch_has_a_row() -> None:
    folder = str(quantized_folder("M8"))
    done = RUNNER.invoke(app, ["bench", folder, *QUICK, "--batch", "1", "--batch", "3", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["bits"], row["batch"]) for row in rows] == [
        (bits, batch) for bits in (2, 3, 4, 5, 6) for batch in (1, 3)
    ]
    held = [row["weight_bytes"] for row in rows[::2]]
    assert held == sorted(set(held))
    for row in rows:
        assert row["decode_tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["decode_ms"], rel=0.05)
    table = RUNNER.invoke(app, ["bench", folder, *QUICK]).stdout
    assert "tokens/s" in table


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["none"], "quantize the model"), ([None, "--steps", "600"], "tokens"), ([None, "--dtype", "int3"], "int3")],
)
def test_bad_input_leaves_with_code_2_and_says_what(arguments: list[str | None], word: str) -> None:
    folder = str(quantized_folder("M8"))
    done = RUNNER.invoke(app, ["bench", *[folder if a is None else a for a in arguments], "--device", "cpu"])
    assert done.exit_code == 2
    assert word in done.stderr.splitlines()[-1]
