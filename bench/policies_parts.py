"""What bench/policies.py puts together: a calibrated checkpoint, the model's own answers, and plans for windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from policies_plans import Contender, budget_bytes
from quality_parts import Setup, quantized
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from pagedweight.calibration.collect import collect
from pagedweight.calibration.divergence import Reference
from pagedweight.calibration.pipeline import Options, calibrate_model
from pagedweight.calibration.sequences import SequenceSignals
from pagedweight.checkpoint import FOLDER, METADATA, Checkpoint, CheckpointWriter
from pagedweight.layout import BlockId, PackedBlock
from pagedweight.policy import Policy
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.table_view import TableSnapshot

BlockOf = Callable[[BlockId], PackedBlock]


class Answers(NamedTuple):
    """A text's windows, the model's own next-token distributions P as moments, and each window's signals.

    KL(P || Q) of a position is sum_v P_v log P_v - h_Q . (sum_v P_v W_v) + logsumexp(W h_Q), with W the output head's
    rows: all that P needs is a vector and a number, kept once.
    tokens: int64 (n, T). center: float64 (n, T, H), sum_v P_v W_v. negentropy: float64 (n, T), sum_v P_v log P_v.
    signals: what the windows' first tokens show; KL is taken from position `first` on.
    """

    tokens: Tensor
    center: Tensor
    negentropy: Tensor
    signals: SequenceSignals
    first: int


@torch.no_grad()
def kept_answers(model: nn.Module, reference: Reference, signals: SequenceSignals, first: int) -> Answers:
    head = model.get_output_embeddings()
    assert head.bias is None
    center, negentropy = [], []
    for hidden in reference.hidden:
        logits = head(hidden)
        center.append(logits.double().softmax(-1) @ head.weight.double())
        # sum_v P_v log P_v, by the same sums that Q will go through: their rounding cancels, and KL(P || P) is 0.
        negentropy.append((hidden.double() * center[-1]).sum(-1) - logits.logsumexp(-1).double())
    return Answers(reference.windows.tokens, torch.stack(center), torch.stack(negentropy), signals, first)


@torch.no_grad()
def divergence(model: nn.Module, answers: Answers, windows: Sequence[int]) -> tuple[list[float], list[float]]:
    """Mean KL to the model's own answers and mean next-token loss of each window, in nats."""
    chosen = slice(windows[0], windows[-1] + 1)
    hidden = model.get_decoder()(input_ids=answers.tokens[chosen], use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    norm = logits.logsumexp(-1)
    kl = answers.negentropy[chosen] - (hidden.double() * answers.center[chosen]).sum(-1) + norm.double()
    targets = logits[:, :-1].gather(-1, answers.tokens[chosen, 1:, None])[..., 0]
    return _rounded(kl[:, answers.first :]), _rounded((norm[:, :-1] - targets).double()[:, answers.first :])


def _rounded(values: Tensor) -> list[float]:
    return [round(x, 8) for x in values.mean(-1).tolist()]


class Contest(NamedTuple):
    """One model, its policy, the page table at the parent width, and held-out answers by text."""

    setup: Setup
    policy: Policy
    table: TableSnapshot
    answers: Mapping[str, Answers]

    def plan(self, contender: Contender, budget: str, text: str, window: int) -> np.ndarray:
        """(R,) widths that a contender chooses for a window."""
        seen = self.observation(text, window) if contender.live else Observation(KVState(1, 1))
        return contender.choose(self.table, seen, self.policy, budget_bytes(self.table, float(budget)))

    def observation(self, text: str, window: int) -> Observation:
        """What the runtime's statistics would say after this window alone, or after its beginning.

        Routing of the very tokens that KL is taken of is known, not estimated: then no count goes with it.
        """
        signals, table = self.answers[text].signals, self.table
        mass = signals.mass[:, window]
        phi = signals.features[:, window]
        by_expert = np.zeros((int(table.layer.max()) + 1, int(table.expert.max()) + 1))
        by_expert[table.layer, table.expert] = mass
        by_expert /= np.maximum(by_expert.sum(1, keepdims=True), 1e-30)
        if self.policy.feature_transform == "log":
            phi = np.log(np.maximum(phi, 1e-30))
        seen = mass > 0
        features = np.where(seen[:, None], phi, 0.0)
        gate_up = table.projection == 0
        routed = np.bincount(table.layer[gate_up], signals.tokens[gate_up, window])
        return Observation(
            KVState(1, 1),
            mass=by_expert,
            routed=routed if self.answers[text].first else None,
            features=features,
            confidence=seen.astype(float),
        )


def calibrated(setup: Setup, method: str, folder: Path, progress: Progress) -> tuple[BlockOf, Policy]:
    """Packed linear-blocks and the policy calibrated for them, from calibration text alone; kept in a folder."""
    if not (folder / FOLDER / METADATA).exists():
        task = progress.add_task("quantize", total=None)
        statistics = collect(setup.model, setup.found, setup.calibration.batches(8))
        made = quantized(setup, method, statistics)
        writer = CheckpointWriter(folder, setup.layout)
        for block in setup.layout.blocks():
            writer.add(block, made[block])
        writer.finish()
        progress.remove_task(task)
    checkpoint = Checkpoint.open(folder)
    blocks = {block: checkpoint.block(block) for block in setup.layout.blocks()}
    if not (folder / FOLDER / "policy.json").exists():
        tasks: dict[str, TaskID] = {}

        def note(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(f"calibrate: {step}", total=total)
            progress.update(tasks[step], completed=done)

        calibrate_model(setup.model, setup.layout, blocks.__getitem__, setup.calibration, Options(), note).write(
            folder / FOLDER
        )
    return blocks.__getitem__, Policy.load(folder / FOLDER)
