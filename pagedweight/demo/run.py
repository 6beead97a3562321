"""The demo: a small trained model generates under a budget, then reads held-out text under the same budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

import pagedweight
from pagedweight.demo.evaluation import (
    HeldOut,
    Meter,
    Quality,
    cache_argument,
    chunked_windows,
    of_reference,
    whole_windows,
)
from pagedweight.demo.timeline import Phase, Recorder, Sample

ASSETS = Path(pagedweight.__file__).parent / "assets"
CHECKPOINT = ASSETS / "tiny-qwen2-moe"
PROMPT = "The old harbour was built in the nineteenth century, and"
CHUNK_TOKENS = 32  # of the held-out text per forward: one window is 16 forwards
IDLE_BOUNDARIES = 32  # enough for the weights to come back one dwell time after the sequence ended


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """tokens: to generate. budget_bytes: for expert weights and KV cache together. windows: of held-out text.

    trace_path: file that planner steps are written to, None for none.
    """

    tokens: int = 480
    budget_bytes: int = 17 * 2**19
    windows: int = 3
    seed: int = 0
    trace_path: str | None = None


class QualityRow(NamedTuple):
    """One line of the quality table; mean_bits and weight_bytes are means over the forwards that were measured."""

    name: str
    mean_bits: float
    weight_bytes: int
    quality: Quality


class DemoResult(NamedTuple):
    prompt: str
    continuation: str
    budget_bytes: int
    block_bytes: int
    samples: list[Sample]
    quality: list[QualityRow]
    seconds: float


def run_demo(options: DemoOptions) -> DemoResult:
    """Load, measure every uniform width, generate, let the weights come back, read; ValueError on a bad budget."""
    started = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress, one_thread():
        with stage(progress, "loading the model", 1):
            model, tokenizer = load(options.budget_bytes, options.trace_path)
            text = HeldOut.load(ASSETS / "heldout").first(options.windows)
        recorder = Recorder(model.pagedweight)
        quality = [bf16_row(model, text), *uniform_rows(model, text, progress)]
        continuation = generate(model, tokenizer, options, recorder, progress)
        settle(model, recorder)
        quality.append(dynamic_row(model, text, recorder, progress))
        block_bytes = model.pagedweight.snapshot().kv.block_bytes
        model.pagedweight.close()
    seconds = time.perf_counter() - started
    return DemoResult(PROMPT, continuation, options.budget_bytes, block_bytes, recorder.samples, quality, seconds)


def load(budget_bytes: int, trace_path: str | None = None) -> tuple[PreTrainedModel, AutoTokenizer]:
    """The shipped checkpoint in fp32 arithmetic, patched, from the installed package alone."""
    config = pagedweight.RuntimeConfig(
        budget_bytes=budget_bytes, offload_free_blocks=4, reload_free_blocks=8, trace_path=trace_path
    )
    with quiet_transformers():
        model = pagedweight.from_pretrained(CHECKPOINT, config=config, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=False)


def bf16_row(model: PreTrainedModel, text: HeldOut) -> QualityRow:
    """The bf16 model, from its shipped hidden states."""
    return QualityRow("bf16 original", 16.0, 2 * model.pagedweight.layout.weights(), of_reference(model, text))


def uniform_rows(model: PreTrainedModel, text: HeldOut, progress: Progress) -> Iterator[QualityRow]:
    """Every linear-block at the same width, for each width, the parent width last."""
    runtime = model.pagedweight
    with stage(progress, "held-out text at each width", len(runtime.layout.widths) * len(text.tokens)) as advance:
        for width in runtime.layout.widths:
            with runtime.held_at(width):
                quality = whole_windows(model, text, advance)
                seen = runtime.snapshot()
            yield QualityRow(f"{width} bits", seen.mean_bits, seen.weight_bytes, quality)


def generate(
    model: PreTrainedModel, tokenizer: AutoTokenizer, options: DemoOptions, recorder: Recorder, progress: Progress
) -> str:
    """Sample a continuation of exactly options.tokens tokens, recording the arena after every forward."""
    prompt = tokenizer(PROMPT, return_tensors="pt")
    cache = model.pagedweight.new_cache()
    torch.manual_seed(options.seed)
    with stage(progress, "generating", options.tokens) as advance:
        watch = Watch(lambda length: (recorder.record(Phase.GENERATE, length), advance()))
        ids = model.generate(
            **prompt,
            **{cache_argument(model): cache},
            max_new_tokens=options.tokens,
            min_new_tokens=options.tokens,
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            repetition_penalty=1.1,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
    cache.release()
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def settle(model: PreTrainedModel, recorder: Recorder) -> None:
    """Boundaries with no sequence: the KV blocks are free, so the weights come back."""
    for _ in range(IDLE_BOUNDARIES):
        model.pagedweight.boundary()
        recorder.record(Phase.IDLE, 0)


def dynamic_row(model: PreTrainedModel, text: HeldOut, recorder: Recorder, progress: Progress) -> QualityRow:
    """The held-out text read a chunk at a time, each window in a cache of its own that grows into the budget."""
    runtime, meter = model.pagedweight, Meter(model, text)
    first = len(recorder.samples)
    with stage(progress, "held-out text under the budget", text.tokens.numel()) as advance:
        for tokens in chunked_windows(model, text, runtime.new_cache, CHUNK_TOKENS, meter):
            recorder.record(Phase.READ, tokens)
            advance(CHUNK_TOKENS)
    read = recorder.samples[first:]
    mean_bits = sum(s.mean_bits for s in read) / len(read)
    weight_bytes = sum(s.weight_bytes for s in read) // len(read)
    return QualityRow("paged, in the budget", mean_bits, weight_bytes, meter.quality())


class Watch(StoppingCriteria):
    """Calls back with the sequence's length after every generated token; never stops."""

    def __init__(self, seen: Callable[[int], None]) -> None:
        self._seen = seen

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self._seen(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def stage(progress: Progress, name: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar of `total` steps; yields its advance(steps=1)."""
    task = progress.add_task(name, total=total)
    yield lambda steps=1: progress.advance(task, steps)
    progress.update(task, completed=total)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the library's own progress bars, which would break up ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: for matrices this small more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
