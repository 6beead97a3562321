"""RuntimeConfig: every choice a user has over the runtime, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral

FRAME_ALIGNMENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Sizes, thresholds and periods of the runtime.

    budget_bytes: device bytes for expert weights and KV cache together; None holds every weight at the parent width.
    frame_bytes: bytes of an arena frame; None lets the kernels choose for the model's shapes.
    block_tokens: tokens of one KV block.
    offload_free_blocks: weights give memory away when this many KV blocks or fewer are free.
    reload_free_blocks: weights take memory back only while more KV blocks than this stay free.
    min_dwell_steps: boundaries for which a changed row keeps its width before it may be raised.
    plan_period_steps: boundaries between plans while there is no pressure; under pressure every boundary plans.
    max_loading_bytes: bytes in flight to the device at once; bounds what one boundary launches.
    host_pinned_bytes: page-locked host memory for page copies; None locks all of it. The rest is pageable, and slower.
    batched_copies: one call of the CUDA driver for many copies; False where a driver fails at that: pages then come
        back more slowly.
    max_requests: request slots of the routing statistics; above 1 the rows of a batch are counted apart, the row
        numbers modulo max_requests, and a slot starts anew with its sequence.
    forecast_tokens: tokens that each sequence in the arena is expected to write soon; weights make room for them before
        they come. 0 switches the forecast off.
    weight_limit_bytes: bytes that expert weights may hold at most, whatever the KV cache leaves; None for no limit.
    damage_limit: quality budget: predicted damage, against every linear-block at the parent width and in calibration's
        units, that no plan exceeds; memory that this keeps is missing elsewhere. None for no limit.
    pinned_experts: (layer, expert, bits), in the model's own numbers: experts that never go below so many bits.
    background_rows: models of so many linear-blocks or more are planned on a thread beside the forwards; below, a plan
        takes no longer than handing it over would.
    trace_path: file that planner steps are written to as JSON lines, for `pagedweight replay`; None for none.
    deterministic: wait at each boundary for every transfer and plan, so that results do not depend on speed.
    ValueError or TypeError, in one sentence, for a value that cannot be.
    """

    budget_bytes: int | None = None
    frame_bytes: int | None = None
    block_tokens: int = 16
    offload_free_blocks: int = 8
    reload_free_blocks: int = 16
    min_dwell_steps: int = 4
    plan_period_steps: int = 8
    max_loading_bytes: int = 512 * 2**20
    host_pinned_bytes: int | None = None
    batched_copies: bool = True
    max_requests: int = 1
    forecast_tokens: int = 0
    weight_limit_bytes: int | None = None
    damage_limit: float | None = None
    pinned_experts: tuple[tuple[int, int, int], ...] = ()
    background_rows: int = 512
    trace_path: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("int") and value is not None and not isinstance(value, Integral):
                raise TypeError(f"{field.name} is {value!r}, a {type(value).__name__}; give an int")
        for name in ("budget_bytes", "frame_bytes", "weight_limit_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give a positive number of bytes, or None")
        for name in ("block_tokens", "plan_period_steps", "max_loading_bytes", "max_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("offload_free_blocks", "min_dwell_steps", "forecast_tokens", "background_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.damage_limit is not None and not self.damage_limit >= 0:
            raise ValueError(f"damage_limit is {self.damage_limit}; give a damage of 0 or more, or None for no limit")
        if any(len(pin) != 3 for pin in self.pinned_experts):
            raise ValueError(f"pinned_experts is {self.pinned_experts}; give (layer, expert, bits) for each")
        if self.host_pinned_bytes is not None and self.host_pinned_bytes < 0:
            raise ValueError(f"host_pinned_bytes is {self.host_pinned_bytes}; give 0 for none, or None for all")
        if self.frame_bytes is not None and self.frame_bytes % FRAME_ALIGNMENT_BYTES:
            raise ValueError(
                f"frame_bytes is {self.frame_bytes}; it must be a multiple of {FRAME_ALIGNMENT_BYTES}, "
                "so that kernels can load aligned words"
            )
        if self.reload_free_blocks <= self.offload_free_blocks:
            raise ValueError(
                f"reload_free_blocks is {self.reload_free_blocks} and offload_free_blocks {self.offload_free_blocks}; "
                "reload must be the larger, or pages would move back and forth"
            )
