"""What the engine says of its expert weights: figures for metrics, and answers to questions from the front end."""

from __future__ import annotations

from typing import Any, NamedTuple

from pagedweight.integrations.vllm.tenant import Tenant
from pagedweight.layout import BlockId, Projection

RPC = "pagedweight_report"


class Figures(NamedTuple):
    """One moment of one engine, as numbers. Bytes are of all layers on one rank; kv_bytes counts blocks in use."""

    mean_bits: float
    lowest_mean_bits: float
    resident_bytes: float
    paged_bytes: float
    kv_bytes: float
    free_bytes: float
    lowered: float
    raised: float
    blocks_given: float
    blocks_taken: float
    moved_frames: float
    rescues: float
    shortfall_bytes: float
    planning_seconds: float


def figures(tenant: Tenant, total_blocks: int, resident_bytes: int, planning_seconds: float) -> Figures:
    """total_blocks: of the pool, without the null block."""
    planner = tenant.planner
    held, free = planner.tenancy.held_blocks, tenant.free_blocks
    return Figures(
        mean_bits=float(planner.tenancy.width.mean()),
        lowest_mean_bits=tenant.lowest_mean_bits,
        resident_bytes=resident_bytes,
        paged_bytes=held * planner.block_bytes,
        kv_bytes=(total_blocks - held - free) * planner.block_bytes,
        free_bytes=free * planner.block_bytes,
        shortfall_bytes=tenant.shortfall_bytes,
        planning_seconds=planning_seconds,
        **tenant.counts._asdict(),
    )


def explain(tenant: Tenant, block: tuple[int, int, str] | None) -> str:
    """Why a linear-block (layer, expert, "gate_up" or "down") has its width, or, without one, what is going on.

    KeyError when the model has no such linear-block.
    """
    if block is None:
        return tenant.describe()
    layer, expert, label = block
    named = BlockId(layer, expert, Projection.GATE_UP if label == Projection.GATE_UP.label else Projection.DOWN)
    return f"{named}: {tenant.planner.explain(tenant.planner.layout.row(named), tenant.kv_state())}"


def report(llm: Any, block: tuple[int, int, str] | None = None) -> dict[str, Any]:
    """Figures, and an explanation in words, of the engine behind a vllm.LLM.

    block: (layer, expert, "gate_up" or "down") to explain; None for what is going on. With vLLM's AsyncLLM:
    `await engine.engine_core.call_utility_async("pagedweight_report", block)`.
    """
    core = llm.llm_engine.engine_core
    in_process = getattr(core, "engine_core", None)
    if in_process is not None and hasattr(in_process, RPC):
        return getattr(in_process, RPC)(block)
    return core.call_utility(RPC, block)
