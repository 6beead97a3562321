"""The runtime of one model on one device: one boundary between forwards, in which everything happens in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from pagedweight.layout import BlockId, BlockTables, Layout, Projection, RoutingStats
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_limits import cheapest_to_drop, limits_of
from pagedweight.runtime.controller_plan import Planning
from pagedweight.runtime.controller_report import RuntimeSnapshot, block_named, explain_row, take_snapshot
from pagedweight.runtime.controller_rescue import Allocated, Rescue
from pagedweight.runtime.controller_signals import SignalReader
from pagedweight.runtime.controller_turn import Turn, in_turn
from pagedweight.runtime.controller_widths import Widths
from pagedweight.runtime.frames import KV_OWNER, Arena
from pagedweight.runtime.interrupts import InterruptsHeld
from pagedweight.runtime.kv import ArenaGauge, KVGauge, KVState
from pagedweight.runtime.observe import Observation
from pagedweight.runtime.pager import Pager
from pagedweight.runtime.pager_room import KVMoved
from pagedweight.runtime.pages import HostPages
from pagedweight.runtime.planner import initial_bits
from pagedweight.runtime.planner_explain import explain
from pagedweight.runtime.planner_trace import TraceWriter
from pagedweight.runtime.table import PageTable
from pagedweight.runtime.transfer import TransferEngine


class Runtime:
    """Widths, pages and KV blocks of one arena.

    At construction every row is placed at the floor, then raised to the widths that the policy chooses under the
    arena's free bytes, less the KV blocks that the reload threshold keeps free. Without a gauge widths stay as they
    are. Call `boundary` once before every forward.

    Calls from several threads take turns, and interrupts wait while the books change. Once KV may move
    (follow_kv), no call may run beside a forward that reads KV.
    """

    def __init__(
        self,
        layout: Layout,
        host: HostPages,
        arena: Arena,
        policy: Policy,
        config: RuntimeConfig,
        engine: TransferEngine,
        gauge: KVGauge | None = None,
        stats: RoutingStats | None = None,
    ) -> None:
        policy.check_layout(layout)
        self.layout = layout
        self.arena = arena
        self.config = config
        self.policy = policy
        self._host = host
        self._engine = engine
        self._gauge = gauge
        self._weights = np.array([n * k for n, k in layout.row_shapes()], dtype=np.int64)
        self._table = PageTable(layout, host.sizes, arena, engine.upload)
        self._pager = Pager(self._table, arena, host, engine)
        self._widths = Widths(self._table, self._pager, arena, config.max_loading_bytes)
        self._signals = SignalReader(
            stats,
            engine,
            log_features=policy.feature_transform == "log",
            rho_bounds=(policy.rho_min, policy.rho_max),
        )
        self._limits = limits_of(config, layout)
        trace, shared = None, isinstance(gauge, ArenaGauge)
        if config.trace_path is not None:
            shared_bytes = arena.memory.numel() if shared else None
            trace = TraceWriter.to(config.trace_path, self._table.snapshot(), policy, shared_bytes)
        parts = self._table, self._pager, arena, policy, config, self._signals, self._limits
        self._planning = Planning(*parts, trace, shared=shared)
        self._kv: KVState | None = None
        self._turn = Turn()
        self._pauses = 0
        self._closed = False
        self._rescue = Rescue(arena, self._release, lambda: not self._paused)
        resident = host.sizes.resident_bytes()
        self._floor_bytes = int(resident[:, 0].sum())
        self._rescue_order = cheapest_to_drop(policy, resident)
        with ExitStack() as on_error:
            on_error.callback(self._planning.close)
            self._place()
            on_error.pop_all()

    @property
    def tables(self) -> BlockTables:
        """What kernels read; written in place for life."""
        return self._table.tables

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._pager.idle

    def boundary(
        self, pending_blocks: int = 0, *, forecast_blocks: int = 0, request_kv: np.ndarray | None = None
    ) -> None:
        """Between two forwards: collect, raise, read, plan, lower, publish, start. Waits for the device only when
        the coming forward's KV blocks (pending_blocks) do not fit otherwise, or when the config asks for determinism.
        Nothing happens while a CUDA graph is captured.

        forecast_blocks: KV blocks expected after the coming forward's. request_kv: float (R_s,), what each request slot
        holds of the KV cache, in any unit, by which the requests' statistics are weighed; None weighs them alike.
        """
        self._turn.after_others()
        with self._turn.lock:
            if not (self._paused or self._engine.capturing()):
                self._boundary(pending_blocks, forecast_blocks, request_kv)

    def _boundary(self, pending_blocks: int, forecast_blocks: int, request_kv: np.ndarray | None) -> None:
        if not self._pager.idle:
            with InterruptsHeld():
                self._pager.collect(wait=self.config.deterministic)
                self._pager.raise_landed()
        self._kv = self._read(pending_blocks)
        self._signals.request_kv = request_kv
        moves = self._planning.decide(self._kv, forecast_blocks).transitions if self._kv else ()
        if moves or not (self._pager.idle and self._table.published):
            with InterruptsHeld():
                self._pager.lower(moves)
                self._table.publish()
                self._pager.start(moves)
        self._make_room(self._kv)
        self._table.advance()

    @in_turn
    def pause(self) -> None:
        """Until as many calls of resume, boundaries do nothing: while a CUDA graph is captured, nothing may move or be
        asked.

        Returns when a boundary on another thread has ended.
        """
        self._pauses += 1

    @in_turn
    def resume(self) -> None:
        self._pauses = max(0, self._pauses - 1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Paused until the block is left, also by an interrupt that comes on the way in or out."""
        pausing = False
        try:
            with InterruptsHeld():
                self.pause()
                pausing = True
            yield
            with InterruptsHeld():
                self.resume()
                pausing = False
        finally:
            if pausing:
                self.resume()

    @property
    def _paused(self) -> bool:
        return self._pauses > 0 or self._closed

    @in_turn
    def snapshot(self) -> RuntimeSnapshot:
        parts = self._table, self._pager, self.arena.bytes_by_owner(), self._weights, self._kv
        return take_snapshot(*parts, self._planning.shortfall_bytes)

    @in_turn
    def explain(
        self, layer: int | BlockId | None = None, expert: int | None = None, projection: Projection | str | None = None
    ) -> str:
        """Why a linear-block has its width, what that cost, what binds it and what 1 GiB more would free or restore;
        without one, what the runtime is doing and why.

        layer, expert: the model's own numbers. projection: "gate_up" or "down". A BlockId stands for all three.
        Raises KeyError for a linear-block that the model does not have.
        """
        if layer is not None:
            block = layer if isinstance(layer, BlockId) else block_named(layer, expert, projection)
            row, seen = self.layout.row(block), self._table.snapshot()
            observation = self._planning.observe(seen, self._kv or KVState(0, 1), ask=not self._paused)
            return f"{explain_row(self._table, row, block)}; {explain(seen, observation, self.policy, row)}"
        if self._gauge is None:
            return "no KV gauge is attached: widths stay as they are"
        return self._planning.explain(self._kv)

    @in_turn
    def set_request(self, slot: int, *, confidence: float = 1.0, rho_bounds: tuple[float, float] | None = None) -> None:
        """How far the prompt residuals of the request in a slot are trusted (0 to 1), and their clipping bounds.

        Requests are merged by what they hold of the KV cache. Raises ValueError for a slot that does not exist.
        """
        self._signals.set_request(slot, confidence, rho_bounds)

    @in_turn
    def begin_requests(self, slots: int) -> None:
        """New requests come into the first slots; what set_request said of the old ones is forgotten."""
        self._signals.forget_requests(slots)

    @in_turn
    def set_bits(self, bits: np.ndarray | int) -> None:
        """Bring every row to a width (one, or one for each row) and wait until it is there. For evaluation and tests.

        Boundaries go on from there as pressure has it, unless paused. Raises ValueError for an unsupported width,
        OutOfFrames when the arena cannot hold them all, with those that fit in place, RuntimeError after close.
        """
        if self._closed:
            raise RuntimeError("the runtime is closed, its host pages are gone, widths stay; patch the model again")
        with InterruptsHeld():
            self._widths.bring_to(bits)

    @in_turn
    def ensure_bytes(self, wanted_bytes: int) -> None:
        """Make bytes free in the arena now, down to the floor width if need be. Raises OutOfFrames when impossible."""
        self._rescue.ensure(wanted_bytes)

    @in_turn
    def allocating(self, allocate: Callable[[], Allocated], wanted_bytes: int) -> Allocated:
        """What allocate() returns; when it raises OutOfFrames or torch.OutOfMemoryError, weights give bytes up and it
        is tried again, a bounded number of times. Raises OutOfFrames that says what was released and what is missing.
        """
        with InterruptsHeld():
            return self._rescue.allocating(allocate, wanted_bytes)

    def allocate_kv(self, frames: int) -> np.ndarray:
        """int64 ids of frames for the KV cache, taken from the weights if need be. Raises OutOfFrames."""
        return self.allocating(lambda: self.arena.allocate(frames, KV_OWNER), frames * self.arena.frame_bytes)

    def allocate_kv_window(self, frames: int, origin: int) -> int:
        """First id of `frames` contiguous frames for KV that stays in its place, a whole number of times `frames` from
        the frame `origin` on; pages there move, and weights give bytes up if need be. Raises OutOfFrames."""
        return self.allocating(lambda: self._pager.allocate_window(frames, origin), frames * self.arena.frame_bytes)

    @property
    def releasable_bytes(self) -> int:
        """Bytes that weights hold above the floor width: no more of them can be released."""
        held = self.arena.bytes_by_owner()
        return held["plane"] + held["table"] - self._floor_bytes

    @in_turn
    def follow_kv(self, moved: KVMoved) -> None:
        """From now on boundaries may move KV frames within the arena; `moved` is told the old ids and the new."""
        self._pager.follow_kv(moved)

    @in_turn
    def check(self) -> None:
        """Assert the invariants of arena and page table."""
        self.arena.check()
        self._table.check()

    @in_turn
    def close(self) -> None:
        """Finish what is in flight and give host memory back; the runtime does nothing afterwards."""
        self._closed = True
        with InterruptsHeld():
            self._pager.settle()
            self._planning.close()
            self._engine.close()
            self._host.close()

    def _place(self) -> None:
        """Floor first, which must fit; then the initial widths."""
        floor, floor_bytes = self.layout.floor_width, self._floor_bytes
        free = self.arena.free_bytes
        if free < floor_bytes:
            raise ValueError(
                f"the arena has {free} bytes, every linear-block at {floor} bits takes {floor_bytes}; "
                "raise the budget or quantize with a lower floor width"
            )
        self._widths.carry_out(np.full(self.layout.rows, floor))
        self._kv = self._read(0)
        shared = isinstance(self._gauge, ArenaGauge)
        kept_free = (self.config.reload_free_blocks + 1) * self._kv.block_bytes if shared and self._kv else 0
        seen = self._table.snapshot()
        budget = max(floor_bytes, free - kept_free)
        if self._limits.weight_bytes is not None:
            budget = min(budget, self._limits.weight_bytes)
        self.set_bits(initial_bits(seen, self.policy, budget, Observation(KVState(0, 1), limits=self._limits)))

    def _read(self, pending_blocks: int) -> KVState | None:
        if self._gauge is None:
            return None
        state = self._gauge.read()
        return state._replace(pending_blocks=state.pending_blocks + pending_blocks) if pending_blocks else state

    def _make_room(self, kv: KVState | None) -> None:
        """The coming forward's blocks, where they come from the arena; what cannot be had, its allocation reports."""
        if kv is not None and kv.pending_blocks and isinstance(self._gauge, ArenaGauge):
            self._release(kv.pending_blocks * kv.block_bytes)

    def _release(self, wanted_bytes: int) -> int:
        if self._paused or wanted_bytes <= self.arena.free_bytes:
            return self.arena.free_bytes
        with InterruptsHeld():
            return self._pager.rescue(wanted_bytes, self._planning.within_limits(self._rescue_order))
