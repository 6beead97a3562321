"""The rows of bench/e2e/throughput.py: bf16 experts, uniform widths, and mixed ones in the same bytes."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from bench.e2e.captured import CapturedDecoding
from bench.e2e.drawn import Drawn
from bench.e2e.throughput_memory import fresh_peak, memory_by_pool, peak_bytes
from bench.e2e.throughput_peers import GROUPED, MARLIN, NOT_COMPILED, put_int4, register_peers
from bench.e2e.throughput_widths import held_bytes, mixed_bits
from pagedweight import RuntimeConfig
from pagedweight.integrations.kv_pool import sequence_frames

SETTLING_STEPS = 4


class Setting(NamedTuple):
    """Of every row. rounds: how often uniform and mixed take turns; steps: of each time.

    profiled: batches whose kernels are listed too. compiled: what is small in each layer is fused by torch.compile.
    """

    context_tokens: int
    steps: int
    rounds: int
    profiled: tuple[int, ...] = ()
    compiled: bool = False

    def decoding(self, model: PreTrainedModel, batch: int) -> CapturedDecoding:
        return CapturedDecoding(model, batch, self.context_tokens, compiled=self.compiled)


def measured(decoding: CapturedDecoding, setting: Setting) -> list[float]:
    """Milliseconds a step, once per round."""
    decoding.milliseconds(SETTLING_STEPS)
    return [float(decoding.milliseconds(setting.steps).mean()) for _ in range(setting.rounds)]


def row_of(decoding: CapturedDecoding, experts: str, took: list[float], **more: object) -> dict:
    best = min(took)
    return {
        "experts": experts,
        "batch": decoding.batch,
        "tokens_per_second": 1e3 * decoding.batch / best,
        "step_ms": took,
        **decoding.compilation,
        **more,
    }


def kernels_of(decoding: CapturedDecoding, setting: Setting) -> dict:
    return {"kernels": decoding.kernels()} if decoding.batch in setting.profiled else {}


def peak_of(decoding: CapturedDecoding, setting: Setting) -> dict:
    """The process's peak so far, and where the memory is that it holds."""
    device = decoding.model.device
    peak = {"peak_reserved_bytes": peak_bytes(device)}
    return peak | ({"memory": memory_by_pool(device)} if decoding.batch in setting.profiled else {})


def patched_beside_cache(drawn: Drawn, width: int) -> PreTrainedModel:
    """Patched with a budget of the bytes of one width, and the least that a budget holds of KV cache: its own cache is
    beside the arena."""
    sizes = drawn.store.host.sizes
    spare = sequence_frames(drawn.kv_layers, sizes.frame_bytes, RuntimeConfig().block_tokens) * sizes.frame_bytes
    return drawn.patched(RuntimeConfig(budget_bytes=drawn.resident_bytes()[width] + spare))


def without_hooks(drawn: Drawn, width: int) -> PreTrainedModel:
    """The same, its boundary left to the caller: a captured step has none inside."""
    model = patched_beside_cache(drawn, width)
    model.pagedweight.hooks.take_off()
    return model


def dense_rows(model: PreTrainedModel, peers: list[str], batches: list[int], setting: Setting) -> list[dict]:
    """Part 2, but for Marlin's experts."""
    implementations, rows = register_peers(), []
    if setting.compiled and GROUPED in peers:  # before anything is
        model.set_experts_implementation(implementations[GROUPED])
        rows += peer_rows(model, NOT_COMPILED, batches, setting._replace(compiled=False))
    for name, implementation in implementations.items():
        if name in peers and name != MARLIN:
            model.set_experts_implementation(implementation)
            rows += peer_rows(model, name, batches, setting)
    return rows


def peer_rows(model: PreTrainedModel, name: str, batches: list[int], setting: Setting) -> list[dict]:
    rows = []
    for batch in batches:
        fresh_peak(model.device)
        decoding = setting.decoding(model, batch)
        took = measured(decoding, setting)
        rows.append(row_of(decoding, name, took, **peak_of(decoding, setting)))
        print(json.dumps(rows[-1]), flush=True)
        rows[-1] |= kernels_of(decoding, setting)
        del decoding
    return rows


def marlin_rows(drawn: Drawn, batches: list[int], setting: Setting) -> list[dict]:
    """Part 2's int4 experts, in the place of those that were dropped."""
    modules, shape = [experts.module for experts in drawn.found], drawn.found[0].shape
    put_int4(modules, shape.hidden, shape.intermediate, shape.experts, drawn.model.device)
    drawn.model.set_experts_implementation(register_peers()[MARLIN])
    rows = peer_rows(drawn.model, MARLIN, batches, setting)
    for module in modules:
        del module.int4
    return rows


def paged_rows(drawn: Drawn, width: int, batches: list[int], setting: Setting) -> list[dict]:
    """Part 3, at the bytes of one uniform width: each batch alone for its peak memory, then all of them in turns."""
    model = without_hooks(drawn, width)
    uniform, mixed = np.full(drawn.store.layout.rows, width), mixed_bits(drawn, width)
    kinds = {"uniform": uniform} if mixed is None else {"uniform": uniform, "mixed": mixed}
    peaks = {}
    with model.pagedweight.held_at(uniform):
        for batch in batches:
            fresh_peak(model.device)
            decoding = setting.decoding(model, batch)
            decoding.milliseconds(SETTLING_STEPS)
            peaks[batch] = peak_of(decoding, setting)
            del decoding
    decodings = [setting.decoding(model, batch) for batch in batches]
    took, listed = taken_in_turns(decodings, kinds, setting)
    rows = []
    for decoding in decodings:
        for kind, bits in kinds.items():
            held = {"bits": float(bits.mean()), "weight_bytes": held_bytes(drawn, bits)}
            of_batch = {name: took[name, decoding.batch] for name in kinds}
            row = row_of(decoding, kind, of_batch[kind], width=width, **peaks[decoding.batch], **held)
            print(json.dumps(row | against(of_batch, kind)), flush=True)
            rows.append(row | against(of_batch, kind) | listed[kind, decoding.batch])
    return rows


def taken_in_turns(
    decodings: list[CapturedDecoding], kinds: dict[str, np.ndarray], setting: Setting
) -> tuple[dict[tuple[str, int], list[float]], dict[tuple[str, int], dict]]:
    """Milliseconds a step by kind and batch, once per round, and kernels."""
    model = decodings[0].model
    took: dict[tuple[str, int], list[float]] = {(kind, own.batch): [] for kind in kinds for own in decodings}
    listed = {}
    for at in range(setting.rounds):
        for kind, bits in kinds.items():
            with model.pagedweight.held_at(bits):
                for decoding in decodings:
                    took[kind, decoding.batch] += measured(decoding, setting._replace(rounds=1))
                    if at == setting.rounds - 1:
                        listed[kind, decoding.batch] = kernels_of(decoding, setting)
    return took, listed


def against(took: dict[str, list[float]], kind: str) -> dict[str, float]:
    """How much slower than uniform, the median of the rounds' ratios."""
    if kind == "uniform":
        return {}
    return {"slower_than_uniform": float(np.median(np.divide(took[kind], took["uniform"])) - 1)}


def bars(rows: list[dict], dense: list[dict]) -> list[dict]:
    """Each width beside each kind of bf16 experts at the same batch."""
    return [
        {
            "batch": row["batch"],
            "width": row["width"],
            "codebooks": row["codebooks"],
            "against": other["experts"],
            "memory_saved": 1 - row["peak_reserved_bytes"] / max(1, other["peak_reserved_bytes"]),
            "times_tokens_per_second": row["tokens_per_second"] / other["tokens_per_second"],
        }
        for row in rows
        for other in dense
        if row["experts"] == "uniform" and row["batch"] == other["batch"]
    ]
