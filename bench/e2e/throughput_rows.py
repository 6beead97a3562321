"""The rows of bench/e2e/throughput.py: bf16 experts, uniform widths, and mixed ones in the same bytes."""

from __future__ import annotations

import gc
import json
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.e2e.captured import CapturedDecoding, compile_layers
from bench.e2e.drawn import Drawn
from bench.e2e.throughput_peers import MARLIN, put_int4, register_peers
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
        **more,
    }


def kernels_of(decoding: CapturedDecoding, setting: Setting) -> dict:
    return {"kernels": decoding.kernels()} if decoding.batch in setting.profiled else {}


def fresh_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that there ever was
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved() if device.type == "cuda" else 0


def without_hooks(drawn: Drawn, budget_bytes: int, *, compiled: bool = False) -> PreTrainedModel:
    """Patched, and its boundary left to the caller: a captured step has none inside."""
    spare = sequence_frames(drawn.kv_layers, drawn.store.host.sizes.frame_bytes, RuntimeConfig().block_tokens)
    budget_bytes += spare * drawn.store.host.sizes.frame_bytes
    model = drawn.patched(RuntimeConfig(budget_bytes=budget_bytes))
    model.pagedweight.hooks.take_off()
    if compiled:
        compile_layers(model, experts_too=False)
    return model


def dense_rows(model: PreTrainedModel, peers: list[str], batches: list[int], setting: Setting) -> list[dict]:
    """Part 2, but for Marlin's experts."""
    rows = []
    for name, implementation in register_peers().items():
        if name not in peers or name == MARLIN:
            continue
        model.set_experts_implementation(implementation)
        if setting.compiled:
            compile_layers(model, experts_too=name.startswith("HF"))
        rows += peer_rows(model, name, batches, setting)
    return rows


def peer_rows(model: PreTrainedModel, name: str, batches: list[int], setting: Setting) -> list[dict]:
    rows = []
    for batch in batches:
        fresh_peak(model.device)
        decoding = CapturedDecoding(model, batch, setting.context_tokens)
        took = measured(decoding, setting)
        rows.append(row_of(decoding, name, took, peak_reserved_bytes=peak_bytes(model.device)))
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
    model = without_hooks(drawn, drawn.resident_bytes()[width], compiled=setting.compiled)
    uniform, mixed = np.full(drawn.store.layout.rows, width), mixed_bits(drawn, width)
    kinds = {"uniform": uniform} if mixed is None else {"uniform": uniform, "mixed": mixed}
    peaks = {}
    with model.pagedweight.held_at(uniform):
        for batch in batches:
            fresh_peak(model.device)
            CapturedDecoding(model, batch, setting.context_tokens).milliseconds(SETTLING_STEPS)
            peaks[batch] = peak_bytes(model.device)
    decodings = [CapturedDecoding(model, batch, setting.context_tokens) for batch in batches]
    took, listed = taken_in_turns(decodings, kinds, setting)
    rows = []
    for decoding in decodings:
        for kind, bits in kinds.items():
            held = {"bits": float(bits.mean()), "weight_bytes": held_bytes(drawn, bits)}
            of_batch = {name: took[name, decoding.batch] for name in kinds}
            row = row_of(decoding, kind, of_batch[kind], width=width, peak_reserved_bytes=peaks[decoding.batch], **held)
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


def held_bytes(drawn: Drawn, bits: np.ndarray) -> int:
    """Arena bytes of planes and tables."""
    sizes = drawn.store.host.sizes
    return int(sizes.resident_bytes()[np.arange(len(bits)), np.searchsorted(sizes.widths, bits)].sum())


def mixed_bits(drawn: Drawn, width: int) -> np.ndarray | None:
    """(R,): at random a third of the rows of each projection one bit up and a third one bit down, then rows back or
    further rows up until as many bytes are held as at the uniform width, no more. None at the lowest and highest width.
    """
    if width in (drawn.store.layout.widths[0], drawn.store.layout.widths[-1]):
        return None
    rng, rows = np.random.default_rng(width), drawn.store.layout.rows
    bits, raised, level = np.full(rows, width), [], []
    for projection in range(2):
        order = 2 * rng.permutation(rows // 2) + projection
        third = len(order) // 3
        bits[order[:third]] += 1
        bits[order[third : 2 * third]] -= 1
        raised.append(order[:third])
        level.append(order[2 * third :])
    limit = held_bytes(drawn, np.full(rows, width))
    for row in rng.permutation(np.concatenate(raised)):
        if held_bytes(drawn, bits) <= limit:
            break
        bits[row] = width
    for row in rng.permutation(np.concatenate(level)):
        bits[row] += 1
        if held_bytes(drawn, bits) > limit:
            bits[row] = width
            break
    return bits


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
