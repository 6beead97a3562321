"""What bench/policies.py puts together: each window's signals as the runtime would see them, and plans of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from bench.policies_energies import adjusted
from bench.policies_plans import Contender, budget_bytes
from bench.quality_judge import Answers, Judge, take_answers
from bench.quality_parts import WIDTHS, Trained
from pagedweight.calibration.sequences import SequenceSignals, observe_sequences
from pagedweight.calibration.text import Windows
from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.table_view import TableSnapshot


class Seen(NamedTuple):
    """One text: the model's own answers, and what each window shows the planner before it plans.

    windows: those signals' tokens. known: they are the very tokens that KL is taken of, so their routing is known and
    not estimated.
    """

    answers: Answers
    signals: SequenceSignals
    windows: Windows
    known: bool


def see(trained: Trained, text: str, signals: str, rows: int) -> Seen:
    """signals: "past" plans from a window's first half and takes KL of the second, "window" both of the whole."""
    windows = trained.texts[text]
    first = windows.tokens.shape[1] // 2 if signals == "past" else 0
    answers = take_answers(trained.model, windows, rows=rows, first=first)
    if first:
        windows = windows._replace(mask=windows.mask & (torch.arange(windows.mask.shape[1]) < first))
    return Seen(answers, observe_sequences(trained.model, trained.found, windows, trained.layout), windows, not first)


def observation(seen: Seen, window: int, table: TableSnapshot, policy: Policy) -> Observation:
    """What the runtime's statistics would say after the tokens that `seen` is of."""
    mass, phi = seen.signals.mass[:, window], seen.signals.features[:, window]
    shape = (int(table.layer.max()) + 1, int(table.expert.max()) + 1)
    by_expert, tokens = np.zeros(shape), np.zeros(shape)
    by_expert[table.layer, table.expert] = mass
    tokens[table.layer, table.expert] = seen.signals.tokens[:, window]
    by_expert /= np.maximum(by_expert.sum(1, keepdims=True), 1e-30)
    visited = mass > 0
    if policy.feature_transform == "log":
        phi = np.log(np.maximum(phi, 1e-30))
    return Observation(
        KVState(1, 1),
        mass=by_expert,
        routed=None if seen.known else tokens.sum(1),
        features=np.where(visited[:, None], phi, 0.0),
        confidence=visited.astype(float),
    )


class Contest(NamedTuple):
    """One model under one policy, and the page table at the parent width.

    factors: by text, (n, R, W), what column energies make of each window's damage; called once, where one asks for it.
    """

    judge: Judge
    policy: Policy
    table: TableSnapshot
    texts: Mapping[str, Seen]
    factors: Callable[[str], np.ndarray]

    def plans(self, contender: Contender, budget: float, text: str) -> np.ndarray:
        """(n, R), the widths that a contender chooses for each window."""
        seen = self.texts[text]
        windows = range(len(seen.answers.tokens))
        budget_ = budget_bytes(self.table, budget)
        if not contender.live:
            bits = contender.choose(self.table, Observation(KVState(1, 1)), self.policy, budget_)
            return np.tile(bits, (len(windows), 1))
        observed = [observation(seen, window, self.table, self.policy) for window in windows]
        policies = [self.policy] * len(windows)
        if contender.by_energies:
            policies = [adjusted(self.policy, factor) for factor in self.factors(text)]
        chosen = zip(observed, policies, strict=True)
        return np.array([contender.choose(self.table, one, policy, budget_) for one, policy in chosen])

    def figures(self, seen: Seen, bits: np.ndarray) -> dict[str, np.ndarray]:
        """KL and loss of each window under its own widths (n, R)."""
        found = self.judge.figures(seen.answers, np.searchsorted(WIDTHS, bits))
        return {"kl": found.kl, "loss": found.loss}
