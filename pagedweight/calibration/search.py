"""A small search over the planner's settings: what each gains, in divergence from the unquantized model at budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from pagedweight.calibration.divergence import diverge, take_reference
from pagedweight.calibration.sequences import SequenceSignals
from pagedweight.calibration.substitution import Substitution
from pagedweight.calibration.text import Windows
from pagedweight.kernels.device_order import choose_frame_bytes, plane_geometry
from pagedweight.layout import Layout
from pagedweight.patching_pages import page_sizes
from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import initial_bits
from pagedweight.runtime.table_view import TableSnapshot

BUDGET_SHARES = (0.15, 0.35, 0.6)  # of the bytes between the floor and the parent width
LEAST_GAIN = 0.005  # a setting must earn this share of the divergence: a few sequences cannot tell less apart
BUCKET_EDGES = ((0.5,), (0.25, 0.75))
BUCKET_RATIOS = (1.25, 1.6, 0.8)  # of one bucket's multiplier to the next colder one's
ALPHAS = (0.5, 1.0)


class Trial(NamedTuple):
    """settings: what the trial changed, by Policy field. kl_nats: by budget. score: 1 for the policy it began with."""

    settings: dict[str, object]
    kl_nats: tuple[float, ...]
    score: float
    kept: bool


class Trials:
    """Scores policies: each sequence gets the plan that its beginning asks for, and is compared with its own answers.

    The model must hold its own weights when this is made. signals: of the beginnings, one sequence per window.
    table: every row at the parent width, with true bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: Windows,
        signals: SequenceSignals,
        layout: Layout,
        table: TableSnapshot,
        substitution: Substitution,
        budget_shares: Sequence[float] = BUDGET_SHARES,
    ) -> None:
        self._model, self._layout, self._table, self._substitution = model, layout, table, substitution
        self._signals = signals
        floor, parent = (int(table.bytes[:, w].sum()) for w in (0, -1))
        self.budgets_bytes = tuple(floor + int(share * (parent - floor)) for share in budget_shares)
        self._references = [
            take_reference(model, windows._replace(tokens=tokens[None], mask=mask[None]))
            for tokens, mask in zip(windows.tokens, windows.mask, strict=True)
        ]

    def score(self, policy: Policy) -> tuple[float, ...]:
        """Mean KL in nats over the sequences, by budget."""
        sequences = range(len(self._references))
        return tuple(float(np.mean([self._divergence(policy, s, b) for s in sequences])) for b in self.budgets_bytes)

    def _divergence(self, policy: Policy, sequence: int, budget_bytes: int) -> float:
        observation = self._observation(policy, sequence)
        self._substitution.write(initial_bits(self._table, policy, budget_bytes, observation))
        return float(diverge(self._model, self._references[sequence]).kl[0])

    def _observation(self, policy: Policy, sequence: int) -> Observation:
        """What the runtime's statistics would say after the sequence's beginning."""
        mass, phi = self._signals.mass[:, sequence], self._signals.features[:, sequence]
        shape = (int(self._table.layer.max()) + 1, int(self._table.expert.max()) + 1)
        by_expert, tokens = np.zeros(shape), np.zeros(shape)
        by_expert[self._table.layer, self._table.expert] = mass
        tokens[self._table.layer, self._table.expert] = self._signals.tokens[:, sequence]
        by_expert /= np.maximum(by_expert.sum(1, keepdims=True), 1e-30)
        seen = mass > 0
        if policy.feature_transform == "log":
            phi = np.log(np.maximum(phi, 1e-30))
        features = np.where(seen[:, None], phi, 0.0)
        confidence = seen.astype(float)
        return Observation(
            KVState(1, 1), mass=by_expert, routed=tokens.sum(1), features=features, confidence=confidence
        )


def table_at_parent(layout: Layout) -> TableSnapshot:
    """Every row at rest at the parent width, with the bytes that the runtime's frames would take."""
    frame_bytes = choose_frame_bytes(layout.row_shapes())
    sizes = page_sizes(layout, [plane_geometry(n, k, frame_bytes) for n, k in layout.row_shapes()])
    parent = np.full(layout.rows, layout.parent_width)
    index = {shape.layer: i for i, shape in enumerate(layout.moe_layers)}
    identity = np.array([(index[block.layer], block.expert, int(block.projection)) for block in layout.blocks()]).T
    idle, since = np.zeros(layout.rows, dtype=bool), np.zeros(layout.rows, dtype=np.int64)
    return TableSnapshot(layout.widths, parent, parent, sizes.resident_bytes(), idle, since, *identity)


def candidates(policy: Policy) -> Iterator[list[dict[str, object]]]:
    """Groups of alternatives, in the order in which they are tried; each changes the best policy so far.

    How far live mass is trusted is not searched: m_cal is of the very text that a search sees, so only other text shows
    what live mass is for (on the tiny trained model a search took half the trust, and lost 3 % of KL on held-out text).
    """
    widths = len(policy.widths)
    if policy.head_confidence.any():
        yield [{"alpha": alpha} for alpha in ALPHAS]
    yield [_buckets(edges, ratio, policy) for edges in BUCKET_EDGES for ratio in BUCKET_RATIOS]
    if widths > 2:
        yield [{"floors": np.array([[policy.widths[1]], [policy.widths[0]]])}]
        yield [{"depth_caps": np.array([[cap], [widths]])} for cap in range(1, widths - 1)]


def _buckets(edges: tuple[float, ...], ratio: float, policy: Policy) -> dict[str, object]:
    multipliers = ratio ** (np.arange(len(edges) + 1) - len(edges) / 2)
    return {"bucket_edges": np.array(edges), "multipliers": multipliers}


def search_policy(
    policy: Policy, score: Callable[[Policy], tuple[float, ...]], advance: Callable[[], None] = lambda: None
) -> tuple[Policy, list[Trial]]:
    """The best policy found and a record of every trial, beginning with the policy's own without its residual.

    score: KL in nats by budget, such as Trials.score. One group of settings is tried after another and kept only if it
    lowers the mean of KL over the first policy's KL by half a percent. The search draws nothing at random.
    """
    policy = policy.replaced(alpha=0.0)
    base = score(policy)
    best, record = 1.0, [Trial({}, base, 1.0, True)]
    advance()
    for group in candidates(policy):
        scored = []
        for settings in group:
            kl = score(_with(policy, settings))
            scored.append((float(np.mean(np.array(kl) / np.maximum(base, 1e-30))), kl, settings))
            advance()
        winner = min(range(len(scored)), key=lambda i: scored[i][0])
        keep = scored[winner][0] < best - LEAST_GAIN
        record += [Trial(s, kl, mean, keep and i == winner) for i, (mean, kl, s) in enumerate(scored)]
        if keep:
            best, policy = scored[winner][0], _with(policy, scored[winner][2])
    return policy, record


def trial_count(policy: Policy) -> int:
    """How many trials search_policy will run."""
    return 1 + sum(len(group) for group in candidates(policy))


def _with(policy: Policy, settings: dict[str, object]) -> Policy:
    """The policy with some settings; per-bucket arrays of one bucket are spread over as many as there are now."""
    buckets = len(np.atleast_1d(settings.get("multipliers", policy.multipliers)))
    spread = {name: settings.get(name, getattr(policy, name)) for name in ("floors", "depth_caps")}
    spread = {name: np.broadcast_to(a, (len(a), buckets)) if a.shape[1] == 1 else a for name, a in spread.items()}
    return policy.replaced(**{**settings, **spread})
