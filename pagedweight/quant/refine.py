"""Better tables and codes in the same format, for the loss that correlated inputs cause: tr(D H D^T), D = W - W^b.

H is the second moment of a linear-block's inputs. k-means minimises the loss of its diagonal only; these functions take
all of it: `refit` solves for every width's table on fixed codes, `descend` also moves the codes, one column at a time,
for all widths together. Everything is batched over a stack of E experts.
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

# What a width's relative loss counts when codes move: most where plans live. Few low codes may move where the highest
# widths count in full, and those have divergence to spare.
EMPHASIS = {1: 0.7, 2: 0.7, 3: 1.1, 4: 1.3, 5: 0.2, 6: 0.06, 7: 0.02, 8: 0.006}
LOSS_FLOOR = 1e-12  # of the weights' own energy: a width without loss does not outweigh all others
RIDGE = 1e-2  # of a code's own moment, towards its k-means value: moments of few tokens would overfit
COLUMN_BLOCK = 32  # columns between two exact recomputations of the gradients
CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 27}  # of one-hot codes in memory at once
SYSTEMS = {"cpu": 64, "cuda": 2048}  # rows' normal equations solved in one call: a GPU takes as long for a few
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

    def errors(self, weight: Tensor, bits: int) -> Tensor:
        """W - W^b, (E, N, K) fp32."""
        return weight - self.values(bits).gather(-1, (self.codes >> (self.parent_width - bits)).long())


def refine_stack(
    weight: Tensor,
    packed: Sequence[PackedBlock],
    moment: Tensor,
    *,
    sweeps: int = 0,
    sweep_bytes: int | None = None,
) -> list[PackedBlock]:
    """The linear-blocks with tables refitted to `moment` (sweeps = 0), or codes and tables in `sweeps` rounds.

    weight: (E, N, K); values beyond +-65504 (fp16) saturate. packed: E blocks as `quantize_stack` makes them, on the
    weight's device. moment: (E, K, K) or (1, K, K), symmetric and positive semi-definite.
    sweep_bytes: of a sweep's working set; the more, the fewer steps. Equal inputs give equal bytes.
    ValueError when shapes do not fit or the moment is not finite.
    """
    experts, _, columns = weight.shape
    if len(packed) != experts or moment.shape[-2:] != (columns, columns) or moment.shape[0] not in (1, experts):
        raise ValueError(
            f"weight {tuple(weight.shape)}, {len(packed)} blocks and moment {tuple(moment.shape)} do not fit; "
            "give E blocks and a moment of (E, K, K) or (1, K, K)"
        )
    if not moment.isfinite().all():
        raise ValueError("the moment holds NaN or infinite values; leave out the tokens that caused them")
    sweep_bytes = sweep_bytes or SWEEP_BYTES.get(weight.device.type, 1 << 26)
    size = moment.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    weight = weight.float().clamp(-FP16_MAX, FP16_MAX)
    moment = (moment / torch.where(size > 0, size, 1.0)).float()
    stack = _unpack(packed)
    for _ in range(sweeps):
        stack = refit(weight, stack, moment)
        stack = stack._replace(codes=descend(weight, stack, moment, sweep_bytes))
    stack = refit(weight, stack, moment)
    return [
        PackedBlock(
            pack_codes(stack.codes[expert], stack.parent_width),
            {bits: table[expert].clone() for bits, table in stack.tables.items()},
            columns,
        )
        for expert in range(experts)
    ]


def _unpack(packed: Sequence[PackedBlock]) -> _Stack:
    parent_width = len(packed[0].planes)
    codes = torch.stack([unpack_codes(block.planes, block.columns, parent_width) for block in packed])
    tables = {bits: torch.stack([block.tables[bits] for block in packed]) for bits in sorted(packed[0].tables)}
    return _Stack(codes, tables, parent_width)


def refit(weight: Tensor, stack: _Stack, moment: Tensor) -> _Stack:
    """The same codes with the tables that minimise tr(D H D^T), up to the ridge."""
    experts, rows, columns = weight.shape
    device = weight.device.type
    at_once = max(1, CHUNK_BYTES.get(device, 1 << 24) // (4 * experts * columns << stack.parent_width))
    together = max(at_once, SYSTEMS.get(device, 64) // experts)
    parts = []
    for chunk in _slices(rows, together):
        own, part = weight[:, chunk], stack.rows(chunk)
        equations = [
            _equations(own[:, c], part.codes[:, c], moment, 1 << stack.parent_width)
            for c in _slices(own.shape[1], at_once)
        ]
        system, target = (torch.cat(sums, 1) for sums in zip(*equations, strict=True))
        parts.append(_solve_widths(system, target, part))
    return stack._replace(tables={bits: torch.cat([part[bits] for part in parts], 1) for bits in stack.tables})


def _slices(count: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _equations(weight: Tensor, codes: Tensor, moment: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Each row's normal equations in the parent's C codes: fp64 (E, N, C, C) and (E, N, C)."""
    code = torch.arange(entries, dtype=torch.uint8, device=weight.device)
    members = codes.unsqueeze(2) == code.view(-1, 1)  # (E, N, C, K)
    mixed = _sum_members(members.flatten(1, 2), moment).view(members.shape)
    system = (mixed @ members.float().mT).double()
    return system, (mixed @ weight.unsqueeze(-1)).squeeze(-1).double()


def _solve_widths(system: Tensor, target: Tensor, stack: _Stack) -> dict[int, Tensor]:
    """Tables by width: the parent's, then each shorter code's by adding up pairs."""
    tables = {}
    for bits in range(stack.parent_width, min(stack.tables) - 1, -1):
        if bits < stack.parent_width:
            system = system[..., ::2] + system[..., 1::2]
            system = system[..., ::2, :] + system[..., 1::2, :]
            target = target[..., ::2] + target[..., 1::2]
        if bits in stack.tables:
            tables[bits] = _solve(system, target, stack.tables[bits], bits)
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


def descend(weight: Tensor, stack: _Stack, moment: Tensor, sweep_bytes: int) -> Tensor:
    """Parent codes (E, N, K) after one pass over the columns, each set to the best code given all the others.

    The loss is the sum over widths of EMPHASIS times tr(D H D^T), each beside what it was before the pass.
    """
    experts, rows, columns = weight.shape
    row_bytes = 4 * experts * (columns * (len(stack.tables) + 2) + (len(stack.tables) + 3 << stack.parent_width))
    step = max(1, sweep_bytes // row_bytes)
    chunks = _slices(rows, step)
    energy = torch.zeros(experts, dtype=torch.float64, device=weight.device)
    losses = torch.zeros(len(stack.tables), experts, dtype=torch.float64, device=weight.device)
    for chunk in chunks:
        part = stack.rows(chunk)
        energy += _loss(weight[:, chunk], moment)
        losses += torch.stack([_loss(part.errors(weight[:, chunk], bits), moment) for bits in part.tables])
    shares = losses / energy.clamp_min(torch.finfo(torch.float32).tiny)
    emphasis = torch.tensor([EMPHASIS[bits] for bits in stack.tables], dtype=shares.dtype, device=shares.device)
    worth = emphasis.view(-1, 1) * shares.clamp_min(LOSS_FLOOR).reciprocal()
    worth = worth.float().view(-1, experts, 1, 1)
    return torch.cat([_descend_rows(weight[:, c], stack.rows(c), moment, worth) for c in chunks], dim=1)


def _descend_rows(weight: Tensor, stack: _Stack, moment: Tensor, worth: Tensor) -> Tensor:
    """One pass over some rows, all columns in turn. worth: (W, E, 1, 1), what a unit of each width's loss counts."""
    parent = torch.arange(1 << stack.parent_width, device=weight.device)
    values = torch.stack([stack.values(bits)[..., parent >> (stack.parent_width - bits)] for bits in stack.tables])
    codes = stack.codes.clone(memory_format=torch.contiguous_format)
    errors = torch.stack([stack.errors(weight, bits) for bits in stack.tables])
    sweep = Sweep(weight.contiguous(), moment.contiguous(), values, worth.contiguous(), codes, errors)
    for first in range(0, weight.shape[2], COLUMN_BLOCK):
        sweep.move(first, min(first + COLUMN_BLOCK, weight.shape[2]))
    return codes


def _loss(error: Tensor, moment: Tensor) -> Tensor:
    """tr(D H D^T) of each expert, (E,) fp64."""
    return ((error @ moment) * error).sum((1, 2), dtype=torch.float64)
