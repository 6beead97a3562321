"""Several ranks as one: what they must agree on, and one policy and one set of signals for rows that move together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pagedweight.checkpoint import FOLDER
from pagedweight.integrations.vllm.block_planner import BlockPlanner
from pagedweight.integrations.vllm.options import ServingOptions
from pagedweight.integrations.vllm.rank_experts import RankReport
from pagedweight.integrations.vllm.tenancy import Tenancy
from pagedweight.policy import Policy
from pagedweight.runtime.observe import Signals


def make_planner(reports: Sequence[RankReport], model: str, options: ServingOptions) -> BlockPlanner:
    """One planner for all ranks, which then do the same at every step. ValueError when ranks differ."""
    first = reports[0]
    check_alike(reports)
    tenancy = Tenancy(first.plane_frames, first.layout.parent_width, first.resident_width, first.frames_per_block)
    if first.s_bar is None:
        policy = policy_of_ranks(Policy.load(Path(model) / FOLDER), reports)
    else:
        mass = np.array([1 / layer.experts for layer in first.layout.moe_layers for _ in range(2 * layer.experts)])
        policy = Policy.from_sensitivity(first.layout, np.sum([report.s_bar for report in reports], axis=0), mass)
    return BlockPlanner(first.layout, policy, tenancy, first.frame_bytes, options)


def check_alike(reports: Sequence[RankReport]) -> None:
    """ValueError unless a block id, a row and a width mean the same on every rank."""
    first = reports[0]
    for number, report in enumerate(reports):
        same = (
            report.layout == first.layout
            and (report.plane_frames == first.plane_frames).all()
            and report[2:5] == first[2:5]
        )
        if not same:
            raise ValueError(
                f"rank {number} holds {report.layout.rows} linear-blocks in frames of {report.frame_bytes} bytes, "
                f"{report.frames_per_block} to a KV block, rank 0 {first.layout.rows}, {first.frame_bytes} and "
                f"{first.frames_per_block}; use a number of ranks that divides experts and attention heads"
            )


def policy_of_ranks(policy: Policy, reports: Sequence[RankReport]) -> Policy:
    """The policy for rows that stand for one expert of every rank: their damages add up, and so does their mass."""
    layout = reports[0].layout
    distinct = {report.experts: report for report in reports}.values()
    rows = np.stack([_rows_of_rank(policy, report) for report in distinct])
    mass = policy.m_cal[rows].sum(0)
    s_bar = policy.sensitivity[rows].sum(0) / np.maximum(mass, np.finfo(np.float64).tiny)[:, None]
    blocks = np.array([(b.layer, b.expert, int(b.projection)) for b in layout.blocks()])
    center = policy.feature_center[rows].mean(0)
    return policy.replaced(blocks=blocks, s_bar=s_bar, m_cal=mass, feature_center=center)


def merged_signals(ranks: Sequence[Signals | None], *, by_expert_rank: bool) -> Signals | None:
    """One table of signals: of tensor-parallel ranks, which see the same, the first; else masses add up."""
    if ranks[0] is None or any(signals is None for signals in ranks):
        return None
    if not by_expert_rank:
        return ranks[0]
    mass, routed, features, confidence = (torch.stack([signals[n] for signals in ranks]) for n in range(4))
    # Each rank's mass is a share of its own; weigh it by the tokens behind it.
    share = routed / routed.sum(0).clamp_min(1e-30)
    return Signals((mass * share[..., None]).sum(0), routed.sum(0), features.mean(0), confidence.amax(0))


def _rows_of_rank(policy: Policy, report: RankReport) -> np.ndarray:
    """The whole model's row of each of a rank's rows; ValueError when the policy lacks one."""
    known = {tuple(block): row for row, block in enumerate(policy.blocks.tolist())}
    named = [
        (layer.layer, expert, projection)
        for layer, experts in zip(report.layout.moe_layers, report.experts, strict=True)
        for expert in experts
        for projection in (0, 1)
    ]
    missing = next((block for block in named if block not in known), None)
    if missing is not None:
        raise ValueError(f"the policy has no row for (layer, expert, projection) {missing}; calibrate again")
    return np.array([known[block] for block in named], dtype=np.int64)
