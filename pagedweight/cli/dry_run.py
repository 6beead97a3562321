"""A dry run of the planner on a checkpoint: no model, no device, no live signals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagedweight.checkpoint import Checkpoint
from pagedweight.layout import Layout
from pagedweight.patching import policy_of
from pagedweight.patching_sizes import resident_bytes
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_limits import limits_of
from pagedweight.runtime.controller_report import block_named
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.planner import Plan, held_bytes, initial_bits
from pagedweight.runtime.planner_explain import explain, outlook
from pagedweight.runtime.table_view import TableSnapshot

_BLOCK = re.compile(r"(?:layers\.)?(\d+)\.(?:experts\.)?(\d+)\.(gate_up|down)")
_PIN = re.compile(r"(\d+)\.(\d+)=(\d+)")


class Planned(NamedTuple):
    """A dry run: the page table before, and the plan that frees the bytes asked for."""

    layout: Layout
    policy: Policy
    table: TableSnapshot
    observation: Observation
    plan: Plan

    @property
    def held_bytes(self) -> int:
        return held_bytes(self.table)

    def widths(self) -> dict[int, tuple[int, int]]:
        """Linear-blocks at each width, before and after."""
        after = self.table.committed.copy()
        for move in self.plan.transitions:
            after[move.row] = move.to_bits
        return {b: (int((self.table.committed == b).sum()), int((after == b).sum())) for b in self.layout.widths}

    def document(self) -> dict[str, object]:
        """Everything, for --json."""
        blocks = list(self.layout.blocks())
        moves = [
            {"block": str(blocks[move.row]), **move._asdict()} | {"row": int(move.row)}
            for move in self.plan.transitions
        ]
        return {
            "held_bytes": self.held_bytes,
            "released_bytes": self.plan.released_bytes,
            "shortfall_bytes": self.plan.shortfall_bytes,
            "damage": self.plan.damage,
            "widths": {str(b): {"before": n, "after": m} for b, (n, m) in self.widths().items()},
            "transitions": moves,
        }


def dry_run(checkpoint: Path, free_bytes: int, weight_bytes: int | None, config: RuntimeConfig) -> Planned:
    """The plan for a checkpoint's layout and policy, without live signals. ValueError or CheckpointError otherwise."""
    layout, policy = Checkpoint.open(checkpoint).layout, policy_of(checkpoint)
    policy.check_layout(layout)
    limits = limits_of(config, layout)._replace(dwell_steps=0, raise_bytes=None)
    observation = Observation(KVState(0, 1), limits=limits)
    table = _at_parent(layout)
    if weight_bytes is not None:
        bits = initial_bits(table, policy, weight_bytes, observation)
        table = table._replace(committed=bits, desired=bits)
    return Planned(layout, policy, table, observation, outlook(table, observation, policy, free_bytes).lowering)


def _at_parent(layout: Layout) -> TableSnapshot:
    parent, known = np.full(layout.rows, layout.parent_width), np.zeros(layout.rows, dtype=np.int64)
    index = {moe.layer: at for at, moe in enumerate(layout.moe_layers)}
    identity = np.array([(index[b.layer], b.expert, int(b.projection)) for b in layout.blocks()]).T
    return TableSnapshot(layout.widths, parent, parent, resident_bytes(layout), known > 0, known, *identity)


def parse_pin(text: str) -> tuple[int, int, int]:
    match = _PIN.fullmatch(text)
    if not match:
        raise ValueError(f"--pin {text!r} is not LAYER.EXPERT=BITS, such as 3.7=6")
    return tuple(map(int, match.groups()))


def explained(planned: Planned, name: str, more_bytes: int) -> str:
    """Why a linear-block is where it is before the plan, and where the plan takes it."""
    match = _BLOCK.fullmatch(name)
    if not match:
        raise ValueError(f"--explain {name!r} is not a linear-block, such as layers.3.experts.7.down")
    block = block_named(int(match[1]), int(match[2]), match[3])
    if block not in set(planned.layout.blocks()):
        raise ValueError(f"--explain {name}: the checkpoint has no such linear-block")
    row = planned.layout.row(block)
    moved = [f"the plan takes it to {move.to_bits} bits" for move in planned.plan.transitions if move.row == row]
    told = explain(planned.table, planned.observation, planned.policy, row, more_bytes)
    return f"{block}: {''.join(moved) or 'the plan leaves it'}; {told}"
