"""The demo, run short: what it prints must be what the runtime held, and its measures must be right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from pagedweight.cli.main import app
from pagedweight.demo.evaluation import WINDOW_TOKENS, HeldOut, Meter
from pagedweight.demo.run import ASSETS, CHECKPOINT
from pagedweight.demo.timeline import Phase, Sample, thinned

PACKAGE_LIMIT_BYTES = 25_000_000


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """The demo's JSON and its folder: 96 tokens and one held-out window, in a budget that is tight from the start."""
    folder = tmp_path_factory.mktemp("demo")
    short = ["--tokens", "96", "--windows", "1", "--budget", "8MiB", "--json", "--output", str(folder)]
    result = CliRunner().invoke(app, ["demo", *short], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), folder


def phase(shown: tuple[dict, Path], wanted: Phase) -> list[dict]:
    return [s for s in shown[0]["samples"] if s["phase"] == wanted.value]


def test_every_byte_of_the_budget_is_accounted_for(shown: tuple[dict, Path]) -> None:
    kinds = ("planes_bytes", "tables_bytes", "kv_bytes", "free_bytes")
    sums = {sum(sample[kind] for kind in kinds) for sample in shown[0]["samples"]}
    assert len(sums) == 1
    assert shown[0]["budget_bytes"] - 65536 < sums.pop() <= shown[0]["budget_bytes"]


def test_weights_give_way_to_the_cache_and_come_back(shown: tuple[dict, Path]) -> None:
    generating, idle = phase(shown, Phase.GENERATE), phase(shown, Phase.IDLE)
    assert len(generating) == 96
    kv = [s["kv_bytes"] for s in generating]
    assert kv == sorted(kv)
    weights = [s["planes_bytes"] + s["tables_bytes"] for s in generating]
    assert weights[-1] < weights[0]
    assert generating[-1]["mean_bits"] < generating[0]["mean_bits"]
    assert idle[0]["kv_bytes"] == 0
    assert idle[-1]["mean_bits"] > generating[-1]["mean_bits"]
    assert idle[-1]["moving_bytes"] == 0


def test_the_cache_holds_what_its_tokens_need(shown: tuple[dict, Path]) -> None:
    """Each token has K and V of 192 fp32 numbers in each of 4 layers; frames round up."""
    for sample in phase(shown, Phase.GENERATE):
        needed = sample["tokens"] * 4 * 2 * 192 * 4
        assert needed <= sample["kv_bytes"] + 4 * 2 * 192 * 4  # the newest token's keys are not there yet
        assert sample["kv_bytes"] <= needed + 8 * 65536


def test_quality_falls_with_every_bit_and_paging_lies_between(shown: tuple[dict, Path]) -> None:
    rows = {row["name"]: row for row in shown[0]["quality"]}
    bf16, paged = rows.pop("bf16 original"), rows.pop("paged, in the budget")
    divergence = [rows[f"{width} bits"]["quality"]["kl_nats"] for width in (2, 3, 4, 5, 6)]
    assert divergence == sorted(divergence, reverse=True)
    assert abs(bf16["quality"]["kl_nats"]) < 1e-6
    assert divergence[-1] < paged["quality"]["kl_nats"] < divergence[0]
    assert rows["6 bits"]["quality"]["perplexity"] == pytest.approx(bf16["quality"]["perplexity"], rel=0.01)
    held = [rows[f"{width} bits"]["weight_bytes"] for width in (2, 3, 4, 5, 6)]
    assert held == sorted(held)


def test_the_picture_is_a_png_with_every_colour_in_it(shown: tuple[dict, Path]) -> None:
    from matplotlib.image import imread

    pixels = imread(shown[1] / "timeline.png")[..., :3]
    assert pixels.shape[0] >= 600
    assert pixels.shape[1] >= 1000
    for colour in ("#1b6ca8", "#7fb2d9", "#e8862e"):
        wanted = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        share = ((torch.from_numpy(pixels) - wanted).abs().amax(-1) < 0.01).float().mean()
        assert share > 0.01, colour


def test_the_picture_is_an_svg_too(shown: tuple[dict, Path]) -> None:
    assert ElementTree.parse(shown[1] / "timeline.svg").getroot().tag.endswith("svg")


def test_the_file_says_what_was_printed(shown: tuple[dict, Path]) -> None:
    assert json.loads((shown[1] / "demo.json").read_text(encoding="utf-8")) == shown[0]


def test_a_budget_below_the_floor_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--budget", "1MiB", "--output", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "budget" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "none").exists()


class Head(torch.nn.Module):
    """What a Meter needs of a model: an output head, here of random weights."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_the_measures_equal_their_definitions_however_the_text_is_cut(chunk: int) -> None:
    torch.manual_seed(0)
    tokens, hidden = torch.randint(0, 11, (2, 8)), torch.randn(2, 8, 5).half()
    model = Head(11, 5).requires_grad_(False)
    logits = torch.randn(2, 8, 11)
    meter = Meter(model, HeldOut(tokens, hidden))
    for window in range(2):
        for start in range(0, 8, chunk):
            meter.add(window, start, logits[window, start : start + chunk])
    p = torch.softmax(hidden.float() @ model.head.weight.T, -1)
    divergence = (p * (p.log() - torch.log_softmax(logits, -1))).sum(-1).mean()
    loss = functional.cross_entropy(logits[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1))
    assert meter.quality().kl_nats == pytest.approx(divergence.item(), rel=1e-5)
    assert meter.quality().perplexity == pytest.approx(math.exp(loss.item()), rel=1e-5)


def test_the_held_out_text_is_what_its_tokens_say() -> None:
    from transformers import AutoTokenizer

    text = HeldOut.load(ASSETS / "heldout")
    ids = AutoTokenizer.from_pretrained(CHECKPOINT)((ASSETS / "heldout" / "heldout.txt").read_text(encoding="utf-8"))
    assert text.tokens.shape[1] == WINDOW_TOKENS
    assert text.tokens.flatten().tolist() == ids["input_ids"][: text.tokens.numel()]


def test_what_ships_fits_the_wheel_and_says_its_licence() -> None:
    """Uncompressed, so the wheel is smaller still."""
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < PACKAGE_LIMIT_BYTES
    assert "CC BY-SA 4.0" in (CHECKPOINT / "README.md").read_text(encoding="utf-8")


def test_thinning_keeps_order_and_the_ends_of_every_phase() -> None:
    phases = [Phase.GENERATE] * 50 + [Phase.IDLE] * 3 + [Phase.READ] * 20
    samples = [Sample(i, phase, 0, 0, 0, 0, 0, 0, 6.0, 0) for i, phase in enumerate(phases)]
    steps = [s.step for s in thinned(samples, 10)]
    assert steps == sorted(set(steps))
    assert {0, 49, 50, 52, 53, 72} <= set(steps)
    assert len(steps) <= 16
