"""From running sums to each linear-block's importance, shrunk towards what its layer's experts have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pagedweight.bitplane import dequantize
from pagedweight.layout import BlockId, PackedBlock, Projection

if TYPE_CHECKING:
    from pagedweight.calibration.statistics import BlockSums, LayerSums, Statistics

# An expert's own figures weigh as much as its layer's after this many routed tokens.
PRIOR_TOKENS = 32
POOLED_SHARE = 0.9  # an expert's tokens are a selection of its layer's, so the layer's correlations count for less


class Importance(NamedTuple):
    """One projection of one layer. h_ij of Eq. (2) is stake * rows_i * columns_j, in nats per token and routing mass.

    stake: fp64 (E,), sum_ij h_ij for routing mass 1. rows: fp32 (E, N), columns: fp32 (E, K), each summing to 1.
    moments: the layer's BlockSums' second moments, read through `second_moment`.
    counts: int64 (E,), tokens behind each expert's figures.
    """

    projection: Projection
    stake: Tensor
    rows: Tensor
    columns: Tensor
    moments: Tensor | None
    counts: Tensor

    def weights(self) -> Tensor:
        """Importance for the quantizer, fp32 (E, 1, K): a row's codes do not depend on the row's own factor."""
        return self.columns[:, None, :]

    def on(self, device: torch.device) -> Importance:
        """The same on another device."""
        return self._replace(**{name: t.to(device) for name, t in self._asdict().items() if isinstance(t, Tensor)})

    @property
    def correlated(self) -> bool:
        """Whether second moments say more than their diagonal."""
        return self.moments is not None

    def s_bar(
        self, expert: int, weight: Tensor, packed: PackedBlock, widths: Sequence[int], form: str = "quadratic"
    ) -> list[float]:
        """Damage of one linear-block at each width, nats per token and routing mass, from its own weight (N, K).

        form: "diagonal" is Eq. (2) itself; "quadratic" adds the second moment's correlations.
        """
        metric = self.second_moment(expert) if form == "quadratic" and self.correlated else None
        rows, columns, stake = self.rows[expert], self.columns[expert], float(self.stake[expert])
        errors = [weight.to(rows.device).float() - dequantize(packed, bits).to(rows.device) for bits in widths]
        return [stake * _weighed(error, rows, columns, metric) for error in errors]

    def second_moment(self, expert: int) -> Tensor:
        """fp32 (K, K), symmetric, trace 1, diagonal `columns`: what row errors are weighed with beyond Eq. (2).

        Without second moments it is the diagonal alone. The expert's own correlations count by its tokens beside K;
        the rest are its layer's in gate_up, whose input all experts share, and none in down.
        """
        diagonal = self.columns[expert]
        if self.moments is None:
            return torch.diag(diagonal)
        own = len(self.moments) == len(self.counts)
        tokens = int(self.counts[expert]) if own else 0
        trust = tokens / (tokens + len(diagonal))
        mixed = trust * _correlation(self.moments[expert]) if own else torch.zeros_like(self.moments[0])
        if self.projection is Projection.GATE_UP:
            mixed += (1 - trust) * POOLED_SHARE * _correlation(self.moments.sum(0))
        root = diagonal.sqrt()
        mixed *= root[:, None] * root
        mixed.diagonal().copy_(diagonal)
        return mixed


def _weighed(error: Tensor, rows: Tensor, columns: Tensor, metric: Tensor | None) -> float:
    """sum_i rows_i e_i M e_i^T with M the metric (K, K), or diag(columns) where there is none."""
    squares = error.square() @ columns if metric is None else ((error @ metric) * error).sum(1)
    return max(0.0, float(torch.dot(rows.double(), squares.double())))


def _correlation(moment: Tensor) -> Tensor:
    scale = moment.diagonal().clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
    return scale[:, None] * moment * scale


class BlockImportance(Mapping[BlockId, Tensor]):
    """h_ij of every linear-block, fp32 (N, K), in nats per token: what pagedweight.quantize takes as importance.

    Made when asked for, since all of them together are as large as the model in fp32.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._index = {layer.shape.layer: index for index, layer in enumerate(statistics.layers)}

    def __getitem__(self, block: BlockId) -> Tensor:
        index = self._index[block.layer]
        importance = layer_importance(self._statistics, index)[block.projection]
        seen = routing_mass(self._statistics.layers[index])[block.expert]
        scale = (importance.stake[block.expert] * seen).float()
        return torch.outer(scale * importance.rows[block.expert], importance.columns[block.expert])

    def __iter__(self) -> Iterator[BlockId]:
        for layer in self._statistics.layers:
            for expert in range(layer.shape.experts):
                yield from (BlockId(layer.shape.layer, expert, projection) for projection in Projection)

    def __len__(self) -> int:
        return 2 * sum(layer.shape.experts for layer in self._statistics.layers)


def routing_mass(layer: LayerSums) -> Tensor:
    """Eq. (1), fp64 (E,): shares of the layer's routing weight that sum to 1.

    Every expert is credited one average pair more than it got, so that an expert nobody reached still costs something.
    """
    mass = layer.mass + layer.mass.sum() / layer.counts.sum()
    return mass / mass.sum()


def layer_importance(statistics: Statistics, layer_index: int) -> tuple[Importance, Importance]:
    """Importance of gate_up and of down in one layer, finite for every expert."""
    layer = statistics.layers[layer_index]
    return tuple(_importance(statistics, layer, projection) for projection in Projection)


def _importance(statistics: Statistics, layer: LayerSums, projection: Projection) -> Importance:
    sums = layer.blocks[projection]
    trust = layer.counts / (layer.counts + PRIOR_TOKENS)
    # The second-order loss change is half the Fisher quadratic form; over tokens it is per token.
    own = 0.5 * sums.total / statistics.tokens
    pooled = own.sum()  # the layer's shares of routing mass sum to 1
    stake = trust * own / routing_mass(layer) + (1 - trust) * pooled
    shared_rows, shared_columns = _shared_profiles(sums, projection)
    return Importance(
        projection,
        stake,
        _shrunk(sums.rows, shared_rows, trust).float(),
        _shrunk(sums.columns, shared_columns, trust).float(),
        sums.moment,
        layer.counts,
    )


def _shared_profiles(sums: BlockSums, projection: Projection) -> tuple[Tensor, Tensor]:
    """The (N,) row and (K,) column profiles that experts share: the hidden axis; intermediate channels are private."""
    rows, columns = sums.rows.sum(0), sums.columns.sum(0)
    if projection is Projection.GATE_UP:
        return torch.ones_like(rows), columns
    return rows, torch.ones_like(columns)


def _shrunk(own: Tensor, shared: Tensor, trust: Tensor) -> Tensor:
    """(E, X) profiles that sum to 1: own ones by trust (E,), the rest the shared one; uniform where nothing was."""
    return trust[:, None] * _normalized(own) + (1 - trust[:, None]) * _normalized(shared[None])


def _normalized(profile: Tensor) -> Tensor:
    total = profile.sum(-1, keepdim=True)
    return torch.where(total > 0, profile / torch.where(total > 0, total, 1.0), 1.0 / profile.shape[-1])


def cold_blocks(statistics: Statistics, few_tokens: int = PRIOR_TOKENS) -> dict[BlockId, int]:
    """Linear-blocks of experts that fewer than few_tokens tokens reached, with that number; they share figures."""
    return {
        BlockId(layer.shape.layer, expert, projection): count
        for layer in statistics.layers
        for expert, count in enumerate(layer.counts.tolist())
        if count < few_tokens
        for projection in Projection
    }
