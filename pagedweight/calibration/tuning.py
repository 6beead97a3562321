"""Tables that answer as the unquantized model does: codes stay, table entries follow the gradient of the divergence.

Least squares fits each linear-block to its own weights. What its errors do further on, and what other linear-blocks
could make good, only the whole model shows: its next-token distribution is compared with the one it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from pagedweight.bitplane import unpack_codes
from pagedweight.calibration.capture import evaluating, frozen, replaced_forward
from pagedweight.calibration.divergence import Reference, head_logits, last_hidden, take_reference
from pagedweight.calibration.text import Windows
from pagedweight.discovery import ExpertsModule
from pagedweight.layout import BlockId, Layout, PackedBlock, Projection

FP16_MAX = torch.finfo(torch.float16).max
GROUP_WEIGHTS = 1 << 26  # looked up at once, in fp32
KEPT_WEIGHTS = 1 << 28  # a model with more looks them up twice
HELD_OUT_SHARE = 1 / 8  # of the windows, to choose how much of the way to go
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
TUNED_WIDTHS = (2, 3, 4)  # above them the divergence is too small to be worth the steps


class TuningOptions(NamedTuple):
    """epochs: passes over the windows for each width. rows: windows per step.

    rate: the largest step of an entry, in units of the gap between its row's entries: what a width may gain shrinks
    with the gap, and steps that suit 2 bits would undo more than that at 4.
    """

    epochs: int = 2
    rows: int = 16
    rate: float = 0.01
    seed: int = 0


class _Lookup(torch.autograd.Function):
    """values (..., C) at codes (..., K); the gradient of an entry is summed in the same order every time."""

    @staticmethod
    def forward(ctx: object, values: Tensor, codes: Tensor) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.entries = values.shape[-1]
        return values.gather(-1, codes.long())

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        return torch.stack([(gradient * (codes == c)).sum(-1) for c in range(ctx.entries)], dim=-1), None


class _Tables:
    """The 16-bit tables of one width, all linear-blocks of one layer, as parameters on the experts' device.

    codes: by projection, uint8 (E, N, K). steps: by projection, fp32 (E, N, 2^b), how far entries have moved.
    share: of the steps that counts.
    """

    share = 1.0

    def __init__(self, experts: ExpertsModule, bits: int, block: Callable[[BlockId], PackedBlock]) -> None:
        self._layer, self._bits = experts.shape.layer, bits
        device = experts.module.down_proj.device
        self.codes, self._start, self._unit, self.steps = [], [], [], []
        for projection in Projection:
            packed = [block(BlockId(self._layer, e, projection)) for e in range(experts.shape.experts)]
            codes = [unpack_codes(one.planes.to(device), one.columns, bits) for one in packed]
            start = torch.stack([one.tables[bits].to(device).float() for one in packed])
            self.codes.append(torch.stack(codes))
            self._start.append(start)
            self._unit.append((start.amax(-1, keepdim=True) - start.amin(-1, keepdim=True)) / (start.shape[-1] - 1))
            self.steps.append(torch.zeros_like(start, requires_grad=True))

    def groups(self) -> Iterator[slice]:
        """Slices of the experts whose weights may be there at once."""
        experts = len(self.codes[0])
        size = max(1, GROUP_WEIGHTS // sum(codes[0].numel() for codes in self.codes))
        for first in range(0, experts, size):
            yield slice(first, min(first + size, experts))

    def values(self, projection: Projection, experts: slice) -> Tensor:
        moved = self.share * self._unit[projection][experts] * self.steps[projection][experts]
        return self._start[projection][experts] + moved

    def weights(self, projection: Projection, experts: slice) -> Tensor:
        """(experts, N, K) fp32."""
        return _Lookup.apply(self.values(projection, experts), self.codes[projection][experts])

    @torch.no_grad()
    def tuned(self, block: BlockId) -> Tensor:
        """The table as a checkpoint holds it, (N, 2^b) fp16 on the CPU."""
        values = self.values(block.projection, slice(block.expert, block.expert + 1))[0]
        return values.clamp(-FP16_MAX, FP16_MAX).half().cpu()


class _Moved(torch.autograd.Function):
    """Rows of x (n, D) at `source` put at `target` of (size, D); each is named once, so no order of sums matters."""

    @staticmethod
    def forward(ctx: object, x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(source, target)
        ctx.rows = len(x)
        return x.new_zeros(size, x.shape[1]).index_copy_(0, target, x[source])

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        source, target = ctx.saved_tensors
        return (
            gradient.new_zeros(ctx.rows, gradient.shape[1]).index_copy_(0, source, gradient[target]),
            None,
            None,
            None,
        )


class _Pairs(NamedTuple):
    """Routed pairs by expert: pair number `pair[i]` of (T, A) lies at `place[i]` of E stacks of `depth` rows."""

    pair: Tensor
    place: Tensor
    depth: int

    @classmethod
    def of(cls, index: Tensor, experts: int) -> _Pairs:
        """index: (T, A) expert ids; those outside [0, E) are in no stack."""
        expert = index.reshape(-1)
        expert = torch.where((expert >= 0) & (expert < experts), expert, experts)
        counts = torch.bincount(expert, minlength=experts + 1)[:experts]
        depth, routed = torch.stack([counts.max(), counts.sum()]).tolist()
        pair = expert.argsort(stable=True)[:routed]
        first = (counts.cumsum(0) - counts)[expert[pair]]
        place = expert[pair] * depth + torch.arange(routed, device=index.device) - first
        return cls(pair, place, depth)


def _experts_forward(module: nn.Module, tables: _Tables, recompute: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The module's forward on looked-up weights. recompute: make them again in the backward pass instead of keeping."""

    def run(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        (tokens, columns), slots, experts = hidden.shape, index.shape[1], module.num_experts
        pairs = _Pairs.of(index, experts)
        x = hidden.float().unsqueeze(1).expand(-1, slots, -1).reshape(-1, columns)
        x = _Moved.apply(x, pairs.pair, pairs.place, experts * pairs.depth).view(experts, -1, columns)
        parts = []
        for group in tables.groups():
            gate_up, down = (tables.weights(projection, group) for projection in Projection)
            parts.append(torch.bmm(module._apply_gate(torch.bmm(x[group], gate_up.mT)), down.mT))
        y = _Moved.apply(torch.cat(parts).flatten(0, 1), pairs.place, pairs.pair, tokens * slots)
        return (y.view(tokens, slots, -1) * weights.unsqueeze(-1).float()).sum(1).to(hidden.dtype)

    if not recompute:
        return run
    return lambda hidden, index, weights: checkpoint(run, hidden, index, weights, use_reentrant=False)


def tune_tables(
    model: nn.Module,
    found: Sequence[ExpertsModule],
    layout: Layout,
    block: Callable[[BlockId], PackedBlock],
    windows: Windows,
    options: TuningOptions | None = None,
    *,
    widths: Sequence[int] = TUNED_WIDTHS,
    advance: Callable[[], None] = lambda: None,
) -> dict[int, Mapping[BlockId, Tensor]]:
    """By width, every linear-block's table after tuning, (N, 2^b) fp16 on the CPU; the model is as it was afterwards.

    model: with its own weights, the teacher. block: the packed linear-blocks. Only 16-bit tables are tuned, one width
    at a time with every linear-block at it. Some windows are held out; entries go the share of their way that diverges
    least on those, which is none where tuning does not help. The order of the windows is the seed's; equal inputs give
    equal tables. With a single window nothing is tuned.
    advance: called after each of `tuning_steps` steps.
    """
    options = options or TuningOptions()
    reference = take_reference(model, windows, rows=options.rows)
    order = torch.from_numpy(np.random.default_rng(options.seed).permutation(len(windows.tokens)))
    held_out, training = order[: _held_out(windows)], order[_held_out(windows) :]
    tuned = {}
    for bits in tuned_widths(layout, widths):
        tables = [_Tables(experts, bits, block) for experts in found]
        with _looked_up(model, found, tables):
            _descend(model, tables, reference, training, options, advance)
            _choose_share(model, tables, reference, held_out, options.rows)
        by_layer = {experts.shape.layer: own for experts, own in zip(found, tables, strict=True)}
        tuned[bits] = {one: by_layer[one.layer].tuned(one) for one in layout.blocks()}
    return tuned


def tuned_widths(layout: Layout, widths: Sequence[int] = TUNED_WIDTHS) -> list[int]:
    """The layout's widths that tuning changes."""
    return [bits for bits in layout.widths if bits in widths and layout.codebooks[bits] == "lut16"]


def tuning_steps(layout: Layout, windows: Windows, options: TuningOptions, widths: Sequence[int] = TUNED_WIDTHS) -> int:
    """How many steps tune_tables will take."""
    training = len(windows.tokens) - _held_out(windows)
    return len(tuned_widths(layout, widths)) * options.epochs * -(-training // options.rows)


def _held_out(windows: Windows) -> int:
    """How many windows do not train."""
    return max(1, round(HELD_OUT_SHARE * len(windows.tokens)))


@contextmanager
def _looked_up(model: nn.Module, found: Sequence[ExpertsModule], tables: Sequence[_Tables]) -> Iterator[None]:
    """The model with its experts' weights looked up in the tables, in eval mode and frozen."""
    recompute = sum(codes.numel() for own in tables for codes in own.codes) > KEPT_WEIGHTS
    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
        undo.enter_context(frozen(model))
        undo.enter_context(_fast_products())
        # The faster attention kernels add up gradients in whatever order threads come.
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        for experts, own in zip(found, tables, strict=True):
            undo.enter_context(replaced_forward(experts.module, _experts_forward(experts.module, own, recompute)))
        yield


@contextmanager
def _fast_products() -> Iterator[None]:
    """fp32 products by TF32 on a GPU: its errors are far below what 4 bits do to a layer's outputs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _descend(
    model: nn.Module,
    tables: Sequence[_Tables],
    reference: Reference,
    training: Tensor,
    options: TuningOptions,
    advance: Callable[[], None],
) -> None:
    """Move the tables' steps along the gradient. training: numbers of the windows to use."""
    order = np.random.default_rng(options.seed)
    optimizer = torch.optim.Adam([s for own in tables for s in own.steps], lr=options.rate, betas=(0.9, 0.95))
    count = len(training)
    batches = [
        training[torch.from_numpy(part)]
        for _ in range(options.epochs)
        for part in np.split(order.permutation(count), range(options.rows, count, options.rows))
        if len(part)
    ]
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * (0.05 + 0.95 * math.cos(math.pi / 2 * step / len(batches)) ** 2)
        optimizer.zero_grad()
        with torch.enable_grad():
            _divergence(model, reference, batch).backward()
        optimizer.step()
        advance()


@torch.no_grad()
def _choose_share(
    model: nn.Module, tables: Sequence[_Tables], reference: Reference, held_out: Tensor, rows: int
) -> None:
    """Set the share of the steps that diverges least on windows that did not train."""

    def measured(share: float) -> float:
        for own in tables:
            own.share = share
        return sum(float(_divergence(model, reference, batch)) * len(batch) for batch in held_out.split(rows))

    best = min(SHARES, key=measured)
    for own in tables:
        own.share = best


def _divergence(model: nn.Module, reference: Reference, batch: Tensor) -> Tensor:
    """Mean KL(reference || model) over some windows' tokens, nats."""
    device = model.get_output_embeddings().weight.device
    windows = reference.windows
    given = windows._replace(tokens=windows.tokens[batch], mask=windows.mask[batch])
    (one,) = given.batches(len(batch), device)
    logits = last_hidden(model, one)[0][one.mask].float().log_softmax(-1)
    with torch.no_grad():
        expected = head_logits(model, reference.hidden[batch].to(device)[one.mask]).log_softmax(-1)
    return nn.functional.kl_div(logits, expected, log_target=True, reduction="sum") / len(logits)
