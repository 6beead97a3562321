"""A mixture of experts that is nobody's but the user's: no transformers model, called as its author likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import pagedweight
from pagedweight import CheckpointError, RuntimeConfig
from pagedweight.checkpoint import Checkpoint
from tests.support import assert_close

HIDDEN, EXPERTS = 32, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 96, HIDDEN) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 48) / 4)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        every = self._apply_gate(torch.einsum("...h,eih->...ei", x, self.gate_up_proj))
        out = torch.einsum("...ei,ehi->...eh", every, self.down_proj)
        return (weights[..., None] * out.gather(-2, ids[..., None].expand(*ids.shape, HIDDEN))).sum(-2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, ids, weights).view(x.shape)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor | dict[str, Tensor], positions: Tensor | None = None) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Own().eval()


CALLS = {
    "tokens": lambda x: (x,),
    "a batch": lambda x: (x.view(2, 3, HIDDEN),),
    "one vector": lambda x: (x[0],),
    "a dictionary": lambda x: ({"x": x},),
}


@pytest.mark.parametrize("call", CALLS)
@torch.no_grad()
def test_it_is_patched_and_answers_however_it_is_called(model: nn.Module, call: str) -> None:
    inputs = CALLS[call](torch.randn(6, HIDDEN))
    before = model(*inputs)
    pagedweight.patch(model, keep_original=True)
    at_parent = model(*inputs)
    model.pagedweight.set_bits(2)
    errors = [float((got - before).abs().max()) for got in (at_parent, model(*inputs))]
    assert errors[0] < 0.1 * before.abs().max()
    assert errors[0] < errors[1]
    assert_close(pagedweight.unpatch(model)(*inputs), before)


@torch.no_grad()
def test_a_second_argument_of_another_name_is_no_mask(model: nn.Module) -> None:
    x, positions = torch.randn(2, 3, HIDDEN), torch.tensor([[0, 1, 2], [0, 1, 2]])
    pagedweight.patch(model, config=RuntimeConfig(max_requests=2))
    model(x, positions)
    assert model.pagedweight.stats.counts.sum(dim=2).tolist() == [[6, 6], [6, 6]]  # of two experts each


@torch.no_grad()
def test_rows_without_a_batch_are_one_sequence(model: nn.Module) -> None:
    pagedweight.patch(model, config=RuntimeConfig(max_requests=2))
    model(torch.randn(6, HIDDEN))
    assert model.pagedweight.stats.counts.sum(dim=2).tolist() == [[12, 12], [0, 0]]


def test_what_needs_more_than_experts_says_so(model: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=r"Own is not a transformers model that generates.*patch it without budget_bytes"
    ):
        pagedweight.patch(model, config=RuntimeConfig(budget_bytes=2**24))


@torch.no_grad()
def test_its_pages_are_written_once_and_read_by_another_process(model: nn.Module, tmp_path: Path) -> None:
    """The rest of the model is its author's to keep."""
    pagedweight.quantize(model, tmp_path / "quantized")
    assert [path.name for path in (tmp_path / "quantized").iterdir()] == ["pagedweight"]
    other = Own()
    other.load_state_dict({name: t for name, t in model.state_dict().items() if ".experts." not in name}, strict=False)
    x = torch.randn(6, HIDDEN)
    expected = pagedweight.patch(model)(x)
    assert torch.equal(pagedweight.patch(other, checkpoint=tmp_path / "quantized")(x), expected)
    pagedweight.save(other, tmp_path / "saved")
    once, again = (Checkpoint.open(tmp_path / name) for name in ("quantized", "saved"))
    assert all(torch.equal(once.block(block).planes, again.block(block).planes) for block in once.layout.blocks())
    with pytest.raises(CheckpointError, match=r"has pages but no config\.json.*patch\(model, checkpoint=folder\)"):
        pagedweight.load(tmp_path / "saved")


@torch.no_grad()
def test_the_op_is_called_with_what_the_drop_in_says(model: nn.Module) -> None:
    pagedweight.patch(model)
    experts, x = model.layers[1].experts, torch.randn(6, HIDDEN)
    ids, weights = torch.randint(0, EXPERTS, (6, 2)), torch.rand(6, 2)
    assert torch.equal(torch.ops.pagedweight.fused_moe(*experts.call(x, ids, weights)), experts(x, ids, weights))


def test_explain_asks_for_what_names_a_linear_block(model: nn.Module) -> None:
    pagedweight.patch(model)
    for named in ((1,), (1, None, "down")):
        with pytest.raises(KeyError, match="an expert of layer 1 has to be named, and gate_up or down of it"):
            model.pagedweight.explain(*named)
    assert model.pagedweight.explain(1, 0, "down").startswith("layers.1.experts.0.down: 6 bits committed")


def test_a_policy_fits_on_a_screen(model: nn.Module) -> None:
    assert repr(pagedweight.patch(model).pagedweight.policy) == (
        "Policy(16 linear-blocks, widths=(2, 3, 4, 5, 6), 1 buckets, alpha=0.0)"
    )


def test_a_model_that_was_moved_after_it_was_patched_says_what_to_do(model: nn.Module) -> None:
    pagedweight.patch(model).to("meta")
    with pytest.raises(
        ValueError, match=r"is on meta and these experts' pages on cpu, .*; move the model before it is pat"
    ):
        model(torch.randn(6, HIDDEN, device="meta"))
