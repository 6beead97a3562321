"""Better tables and codes in the same format, for the loss tr(G D H D^T) of errors D = W - W^b.

H is the second moment of a linear-block's inputs, G that of the loss's gradient by its outputs. k-means minimises the
loss of their diagonals only; these functions take all of it: `refit` solves for every width's table on fixed codes,
`descend` also moves the codes, one column at a time, for all widths together. Both know H alone: what G adds to a row,
given the others, is another target than its own weights (`_targets`), so rows are done a group at a time. Everything
is batched over a stack of E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagedweight.bitplane import codebook_of, pack_codes, table_values, unpack_codes
from pagedweight.layout import PackedBlock
from pagedweight.quant.codebooks import FP16_MAX, SMOOTH_CODEBOOKS, fit_table, smooth_basis
from pagedweight.quant.descent import Sweep

EVENNESS = 1.0  # 0.5 lowers 2-bit loss further, but on trained models not their KL, and 5 and 6 bits suffer
LOSS_FLOOR = 1e-12  # of the weights' own energy: a width without loss does not outweigh all others
RIDGE = 1e-2  # of a code's own moment, towards its k-means value: moments of few tokens would overfit
COLUMN_BLOCK = 32  # columns between two exact recomputations of the gradients
CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 27}  # of one-hot codes in memory at once
SYSTEMS = {"cpu": 64, "cuda": 2048}  # rows' normal equations solved in one call: a GPU takes as long for a few
ROW_GROUPS = 16  # rows of one group do not see each other's moves
SWEEP_BYTES = {"cpu": 1 << 24, "cuda": 3 << 28}  # of a sweep's working set: a column's steps are short, so many rows


class _Stack(NamedTuple):
    """E linear-blocks of one shape. codes: (E, N, K) uint8 parent codes. tables: by width, (E, N, ...)."""

    codes: Tensor
    tables: dict[int, Tensor]
    parent_width: int

    def values(self, bits: int) -> Tensor:
        return table_values(self.tables[bits], bits)

    def rows(self, chunk: slice) -> _Stack:
        """The same linear-blocks' rows in `chunk`."""
        tables = {bits: table[:, chunk] for bits, table in self.tables.items()}
        return _Stack(self.codes[:, chunk], tables, self.parent_width)

    def errors(self, target: Tensor) -> Tensor:
        """Targets (1 or W, E, N, K) minus what the widths give, (W, E, N, K) fp32, widths ascending."""
        codes = [(self.codes >> (self.parent_width - bits)).long() for bits in self.tables]
        given = target.expand(len(codes), *target.shape[1:])
        return torch.stack(
            [
                own - self.values(bits).gather(-1, code)
                for own, bits, code in zip(given, self.tables, codes, strict=True)
            ]
        )


def refine_stack(
    weight: Tensor,
    packed: Sequence[PackedBlock],
    moment: Tensor,
    *,
    outputs: Tensor | None = None,
    sweeps: int = 0,
    evenness: float = EVENNESS,
    sweep_bytes: int | None = None,
) -> list[PackedBlock]:
    """The linear-blocks with tables refitted to `moment` (sweeps = 0), or codes and tables in `sweeps` rounds.

    weight: (E, N, K); values beyond +-65504 (fp16) saturate. packed: E blocks as `quantize_stack` makes them, on the
    weight's device. moment: (E, K, K) or (1, K, K), H, symmetric and positive semi-definite. outputs: (E, N, N) or
    (1, N, N), G alike; by default rows are independent. evenness: see `_worth`. sweep_bytes: of a sweep's
    working set; the more, the fewer steps. Equal inputs give equal bytes.
    ValueError when shapes do not fit or a moment is not finite.
    """
    experts, rows, columns = weight.shape
    _check_moment(moment, experts, columns)
    if len(packed) != experts:
        raise ValueError(f"weight {tuple(weight.shape)} and {len(packed)} blocks do not fit; give E blocks")
    sweep_bytes = sweep_bytes or SWEEP_BYTES.get(weight.device.type, 1 << 26)
    weight = weight.float().clamp(-FP16_MAX, FP16_MAX).unsqueeze(0)
    moment = _unit_mean(moment)
    stack = _unpack(packed)
    for _ in range(sweeps):
        stack = refit(weight, stack, moment)
        worth = _worth(*_losses_by_rows(weight, stack, moment, sweep_bytes), evenness)
        stack = stack._replace(codes=descend(weight, stack, moment, worth, sweep_bytes))
    stack = refit(weight, stack, moment)
    if outputs is not None:
        _check_moment(outputs, experts, rows)
        stack = _couple_rows(weight, stack, moment, _unit_mean(outputs), sweeps, evenness, sweep_bytes)
    return [
        PackedBlock(
            pack_codes(stack.codes[expert], stack.parent_width),
            {bits: table[expert].clone() for bits, table in stack.tables.items()},
            columns,
        )
        for expert in range(experts)
    ]


def _check_moment(moment: Tensor, experts: int, size: int) -> None:
    if moment.shape[-2:] != (size, size) or moment.shape[0] not in (1, experts):
        raise ValueError(
            f"a moment of {tuple(moment.shape)} does not fit {experts} blocks; give ({experts}, {size}, {size}) or "
            f"(1, {size}, {size})"
        )
    if not moment.isfinite().all():
        raise ValueError("the moment holds NaN or infinite values; leave out the tokens that caused them")


def _unit_mean(moment: Tensor) -> Tensor:
    """fp32, its diagonal 1 on average."""
    size = moment.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    return (moment / torch.where(size > 0, size, 1.0)).float()


def _couple_rows(
    weight: Tensor,
    stack: _Stack,
    moment: Tensor,
    outputs: Tensor,
    sweeps: int,
    evenness: float,
    sweep_bytes: int,
) -> _Stack:
    """Rounds over groups of rows, each fitted to the targets that the other rows' errors make. weight: (1, E, N, K)."""
    groups = _slices(weight.shape[2], -(-weight.shape[2] // ROW_GROUPS))
    errors = stack.errors(weight)
    energy = _losses(weight, moment, outputs)
    for moving in [True] * sweeps + [False]:
        worth = _worth(_losses(errors, moment, outputs), energy, evenness)
        for group in groups:
            part, own = stack.rows(group), weight[:, :, group]
            target = _targets(own, errors, outputs, group)
            if moving:
                part = part._replace(codes=descend(target, part, moment, worth, sweep_bytes))
            part = refit(target, part, moment)
            stack.codes[:, group] = part.codes
            for bits, table in part.tables.items():
                stack.tables[bits][:, group] = table
            errors[:, :, group] = part.errors(own)
    return stack


def _targets(own: Tensor, errors: Tensor, outputs: Tensor, group: slice) -> Tensor:
    """What a group's rows should give at every width, (W, E, n, K): their weights and what makes good others' errors.

    With the other rows fixed, the loss of row i's error d is G_ii d H d^T + 2 sum_k G_ik d_k H d^T; seen from this
    target it is G_ii d H d^T alone.
    """
    size = outputs.diagonal(dim1=1, dim2=2)[:, group]
    coupling = outputs[:, group] / torch.where(size > 0, size, 1.0).unsqueeze(-1)
    coupling.diagonal(dim1=1, dim2=2, offset=group.start).zero_()
    return own + coupling @ errors


def _unpack(packed: Sequence[PackedBlock]) -> _Stack:
    parent_width = len(packed[0].planes)
    codes = torch.stack([unpack_codes(block.planes, block.columns, parent_width) for block in packed])
    tables = {bits: torch.stack([block.tables[bits] for block in packed]) for bits in sorted(packed[0].tables)}
    return _Stack(codes, tables, parent_width)


def refit(target: Tensor, stack: _Stack, moment: Tensor) -> _Stack:
    """The same codes with the tables that minimise tr(D H D^T), up to the ridge, D from a target (1 or W, E, N, K)."""
    _, experts, rows, columns = target.shape
    device = target.device.type
    at_once = max(1, CHUNK_BYTES.get(device, 1 << 24) // (4 * experts * columns << stack.parent_width))
    together = max(at_once, SYSTEMS.get(device, 64) // experts)
    parts = []
    for chunk in _slices(rows, together):
        own, part = target[:, :, chunk], stack.rows(chunk)
        equations = [
            _equations(own[:, :, c], part.codes[:, c], moment, 1 << stack.parent_width)
            for c in _slices(own.shape[2], at_once)
        ]
        systems, sides = zip(*equations, strict=True)
        parts.append(_solve_widths(torch.cat(systems, 1), torch.cat(sides, 2), part))
    return stack._replace(tables={bits: torch.cat([part[bits] for part in parts], 1) for bits in stack.tables})


def _slices(count: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _equations(target: Tensor, codes: Tensor, moment: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Each row's normal equations in the parent's C codes: fp64 (E, N, C, C) and, for each target, (E, N, C)."""
    code = torch.arange(entries, dtype=torch.uint8, device=target.device)
    members = codes.unsqueeze(2) == code.view(-1, 1)  # (E, N, C, K)
    mixed = _sum_members(members.flatten(1, 2), moment).view(members.shape)
    system = (mixed @ members.float().mT).double()
    return system, (mixed @ target.permute(1, 2, 3, 0)).permute(3, 0, 1, 2).double()


def _solve_widths(system: Tensor, sides: Tensor, stack: _Stack) -> dict[int, Tensor]:
    """Tables by width: the parent's, then each shorter code's by adding up pairs. sides: (1 or W, E, N, C)."""
    tables, widths = {}, list(stack.tables)
    for bits in range(stack.parent_width, min(stack.tables) - 1, -1):
        if bits < stack.parent_width:
            system = system[..., ::2] + system[..., 1::2]
            system = system[..., ::2, :] + system[..., 1::2, :]
            sides = sides[..., ::2] + sides[..., 1::2]
        if bits in stack.tables:
            tables[bits] = _solve(system, sides[widths.index(bits) % len(sides)], stack.tables[bits], bits)
    return tables


def _sum_members(members: Tensor, moment: Tensor) -> Tensor:
    """members @ moment, fp32 (E, M, K), for members of 0 and 1, (E, M, K), and a moment (E, K, K) or (1, K, K)."""
    if members.device.type != "cuda":
        return members.float() @ moment
    # Two bf16 parts carry 16 bits of the moment and 0 and 1 are exact, at several times the rate of fp32 products.
    left = members.bfloat16()
    high = moment.bfloat16()
    low = (moment - high).bfloat16()
    if len(moment) < len(members):
        left = left.flatten(0, 1).unsqueeze(0)
    product = torch.bmm(left, high, out_dtype=torch.float32)
    product += torch.bmm(left, low, out_dtype=torch.float32)
    return product.view(members.shape)


def _solve(system: Tensor, target: Tensor, table: Tensor, bits: int) -> Tensor:
    prior = table_values(table, bits).double()
    own = system.diagonal(dim1=-2, dim2=-1)
    pull = torch.where(own > 0, RIDGE * own, 1.0)  # a code without members keeps its value
    system = system + torch.diag_embed(pull)
    target = target + pull * prior
    codebook = codebook_of(table, bits)
    if codebook in SMOOTH_CODEBOOKS:
        basis = smooth_basis(codebook, bits).to(system.device)
        coefficients = torch.linalg.solve(basis.mT @ system @ basis, (target @ basis).unsqueeze(-1)).squeeze(-1)
        return coefficients.clamp(-FP16_MAX, FP16_MAX).to(table.dtype)
    return fit_table(codebook, own, torch.linalg.solve(system, target.unsqueeze(-1)).squeeze(-1))


def descend(target: Tensor, stack: _Stack, moment: Tensor, worth: Tensor, sweep_bytes: int) -> Tensor:
    """Parent codes (E, N, K) after one pass over the columns, each set to the best code given all the others.

    The loss is sum_b worth_b tr(D_b H D_b^T), D_b from the targets (1 or W, E, N, K). worth: (W, E), see `_worth`.
    """
    _, experts, rows, columns = target.shape
    row_bytes = 4 * experts * (columns * (len(stack.tables) + 2) + (len(stack.tables) + 3 << stack.parent_width))
    step = max(1, sweep_bytes // row_bytes)
    worth = worth.float().view(-1, experts, 1, 1)
    parts = [_descend_rows(target[:, :, c], stack.rows(c), moment, worth) for c in _slices(rows, step)]
    return torch.cat(parts, dim=1)


def _worth(losses: Tensor, energy: Tensor, evenness: float) -> Tensor:
    """What a unit of each width's loss counts, (W, E): (energy / loss)^evenness, of losses (W, E) and energy (1, E).

    At 1 every width counts by its relative loss, and few low codes move because the highest width would suffer; at 0
    by its absolute loss, and the highest widths pay for the lowest.
    """
    shares = losses / energy.clamp_min(torch.finfo(torch.float32).tiny)
    return shares.clamp_min(LOSS_FLOOR).pow(-evenness)


def _descend_rows(target: Tensor, stack: _Stack, moment: Tensor, worth: Tensor) -> Tensor:
    """One pass over some rows, all columns in turn. worth: (W, E, 1, 1), what a unit of each width's loss counts."""
    parent = torch.arange(1 << stack.parent_width, device=target.device)
    values = torch.stack([stack.values(bits)[..., parent >> (stack.parent_width - bits)] for bits in stack.tables])
    codes = stack.codes.clone(memory_format=torch.contiguous_format)
    sweep = Sweep(target.contiguous(), moment.contiguous(), values, worth.contiguous(), codes, stack.errors(target))
    columns = target.shape[3]
    for first in range(0, columns, COLUMN_BLOCK):
        sweep.move(first, min(first + COLUMN_BLOCK, columns))
    return codes


def _losses(errors: Tensor, moment: Tensor, outputs: Tensor | None = None) -> Tensor:
    """tr(G D H D^T) of each width and expert, (W, E) fp64, of errors (W, E, N, K)."""
    weighed = torch.stack([(own @ moment) * (own if outputs is None else outputs @ own) for own in errors])
    return weighed.sum((2, 3), dtype=torch.float64)


def _losses_by_rows(target: Tensor, stack: _Stack, moment: Tensor, sweep_bytes: int) -> tuple[Tensor, Tensor]:
    """tr(D H D^T) of each width and expert, (W, E) fp64, and the targets' own (1, E), a few rows at a time."""
    _, experts, rows, columns = target.shape
    step = max(1, sweep_bytes // (8 * experts * columns * len(stack.tables)))
    chunks = _slices(rows, step)
    losses = sum(_losses(stack.rows(c).errors(target[:, :, c]), moment) for c in chunks)
    return losses, sum(_losses(target[:, :, c], moment) for c in chunks)
