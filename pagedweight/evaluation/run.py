"""Quality of a quantized model at budgets: loss of texts and gold answers, and divergence from the model it was."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pagedweight.calibration.divergence import Divergence, Reference, diverge, take_reference
from pagedweight.calibration.search import table_at_parent
from pagedweight.checkpoint import FOLDER
from pagedweight.evaluation.items import Items, Size, read_items
from pagedweight.evaluation.methods import METHODS, REFERENCE, Budget, Method
from pagedweight.evaluation.record import Record
from pagedweight.runtime.kv import KVState
from pagedweight.runtime.observe import Observation, merge_requests, observe
from pagedweight.runtime.table_view import TableSnapshot
from pagedweight.saving import load, load_dense

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]


class Plan(NamedTuple):
    """What to evaluate. reference: the unquantized model; without one the parent width is what is diverged from.

    rows: items per forward. device, dtype: of every model here; None for the GPU if there is one, and for fp32 on a
    CPU or the model's own dtype elsewhere.
    """

    checkpoint: Path
    tasks: Mapping[str, Path]
    methods: Sequence[str]
    budgets: Sequence[Budget]
    reference: str | None = None
    size: Size = Size()
    rows: int = 4
    device: str | None = None
    dtype: str | None = None

    @property
    def on(self) -> dict[str, Any]:
        """For transformers' from_pretrained."""
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = self.dtype or ("float32" if device == "cpu" else "auto")
        return {"device_map": device, "dtype": dtype}

    def settings(self) -> dict[str, Any]:
        """What its figures depend on, but for methods and budgets: those may be added by a later run."""
        return {
            "checkpoint": self.checkpoint.name,
            "pages": digest_of(said_of_pages(self.checkpoint / FOLDER)),
            "reference": None if self.reference is None else Path(self.reference).name,
            "tasks": {name: path.name for name, path in self.tasks.items()},
            "texts": {name: digest_of([path]) for name, path in self.tasks.items()},
            **self.size._asdict(),
            "dtype": self.on["dtype"],
        }

    def check(self) -> None:
        """ValueError for a method that there is none of, or a task without its file."""
        unknown = sorted(set(self.methods) - METHODS.keys())
        if unknown:
            raise ValueError(f"no method is called {unknown[0]!r}; choose from {', '.join(METHODS)}")
        for name, path in self.tasks.items():
            if not path.is_file():
                raise ValueError(f"task {name}: {path} is not a file")


def said_of_pages(folder: Path) -> list[Path]:
    """Where a checkpoint says of its pages what they are, their checksums included, and its policy."""
    return sorted(folder.glob("*.json")) + sorted(folder.glob("policy.*"))


def digest_of(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Patched:
    """The paged model at the widths of a method. table: every row at the parent width, M_i^b in bytes really held."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.runtime = model.pagedweight
        self.table: TableSnapshot = table_at_parent(self.runtime.layout)

    def widths(self, method: Method, budget_bytes: int, seen: Observation | None = None) -> np.ndarray:
        idle = Observation(KVState(1, 1))
        return method.choose(self.table, seen or idle, self.runtime.policy, budget_bytes)

    @torch.no_grad()
    def seen(self, beginning: torch.Tensor) -> Observation:
        """What the kernels' statistics say after the beginning of an item, (T,) tokens, at the widths of now."""
        self.model(input_ids=beginning[None].to(self.model.device), use_cache=False)
        log_features = self.runtime.policy.feature_transform == "log"
        return observe(self.table, KVState(1, 1), 0, merge_requests(self.runtime.stats, log_features=log_features))


def evaluate(plan: Plan, out: Path, progress: Progress = lambda step, done, total: None) -> dict[str, Any]:
    """Measure what the file `out` lacks of a plan, cell by cell; returns its whole content.

    ValueError for files, names and budgets that will not do, before any model is loaded where that can be told.
    """
    plan.check()
    record = Record(out, plan.settings(), plan.on["device_map"])
    tasks = read_tasks(plan)
    references = take_references(plan, tasks, record, progress)
    patched = Patched(load(plan.checkpoint, **plan.on).eval())
    wanted = [(method, budget, task) for method in plan.methods for budget in plan.budgets for task in tasks]
    for done, (method, budget, task) in enumerate(wanted):
        progress("evaluate", done, len(wanted))
        if not record.has(method, budget.name, task):
            began, worked = time.monotonic(), time.process_time()
            cell = measure(patched, METHODS[method], budget.of(patched.table), tasks[task], references[task])
            took = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - worked}
            record.put(cell | {name: round(value, 3) for name, value in took.items()}, method, budget.name, task)
    progress("evaluate", len(wanted), len(wanted))
    patched.runtime.close()
    return record.content


def read_tasks(plan: Plan) -> dict[str, Items]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plan.checkpoint, trust_remote_code=False)

    def encode(text: str) -> Sequence[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return {name: read_items(path, encode, plan.size, tokenizer.eos_token_id) for name, path in plan.tasks.items()}


def take_references(plan: Plan, tasks: Mapping[str, Items], record: Record, progress: Progress) -> dict[str, Reference]:
    """The answers to be diverged from; their own loss goes into the record."""
    model = (load_dense(plan.reference, **plan.on) if plan.reference else load(plan.checkpoint, **plan.on)).eval()
    taken = {}
    for done, (name, items) in enumerate(tasks.items()):
        progress("reference", done, len(tasks))
        taken[name] = take_reference(model, items.windows, rows=plan.rows)
        if not record.has(REFERENCE, "own", name):
            record.put(figures(diverge(model, taken[name], items.scored), items), REFERENCE, "own", name)
    progress("reference", len(tasks), len(tasks))
    if hasattr(model, "pagedweight"):
        model.pagedweight.close()
    return taken


def measure(patched: Patched, method: Method, budget_bytes: int, items: Items, reference: Reference) -> dict[str, Any]:
    """One cell: figures of every item, and the bytes and bits that the weights had."""
    runtime, held = patched.runtime, []
    runtime.set_bits(patched.widths(method, budget_bytes))
    if not method.live:
        held.append(runtime.snapshot())
        found = diverge(patched.model, reference, items.scored)
    else:
        beginnings = [items.windows.tokens[at, : max(1, first)] for at, first in enumerate(items.beginnings)]
        plans = [patched.widths(method, budget_bytes, patched.seen(beginning)) for beginning in beginnings]
        parts = []
        for at, plan in enumerate(plans):
            runtime.set_bits(plan)
            held.append(runtime.snapshot())
            parts.append(diverge(patched.model, reference.one(at), items.scored[at : at + 1]))
        found = Divergence(*map(np.concatenate, zip(*parts, strict=True)))
    sizes = {"weight_bytes": np.mean([s.weight_bytes for s in held]), "bits": np.mean([s.mean_bits for s in held])}
    return figures(found, items) | {name: float(size) for name, size in sizes.items()} | {"budget_bytes": budget_bytes}


def figures(found: Divergence, items: Items) -> dict[str, Any]:
    """Six significant digits of each item."""
    each = {name: [float(f"{x:.6g}") for x in values] for name, values in found._asdict().items()}
    return {"kind": items.kind, "tokens": items.scored.sum(1).tolist(), **each}


def evaluate_harness(
    plan: Plan, out: Path, tasks: Sequence[str], progress: Progress, *, folder: Path | None, limit: int | None
) -> dict[str, Any]:
    """Tasks of lm-evaluation-harness at the widths that each method gives each budget before any text is seen."""
    from transformers import AutoTokenizer

    from pagedweight.evaluation.harness import run_harness

    plan.check()
    record = Record(out, plan.settings(), plan.on["device_map"])
    if record.content.setdefault("harness_limit", limit) != limit:
        raise ValueError(
            f"{out} has harness scores of another --harness-limit ({record.content['harness_limit']}); write to "
            "another file, or remove it"
        )
    tokenizer = AutoTokenizer.from_pretrained(plan.checkpoint, trust_remote_code=False)
    patched = Patched(load(plan.checkpoint, **plan.on).eval())
    wanted = [(method, budget) for method in plan.methods for budget in plan.budgets]
    for done, (method, budget) in enumerate(wanted):
        progress("harness", done, len(wanted))
        name = f"{method}, {budget.name}"
        missing = [task for task in tasks if not record.has(name, task, part="harness")]
        if missing:
            patched.runtime.set_bits(patched.widths(METHODS[method], budget.of(patched.table)))
            options = {"folder": folder, "limit": limit, "rows": plan.rows, "seed": plan.size.seed}
            for task, scores in run_harness(patched.model, tokenizer, missing, **options).items():
                record.put(scores, name, task, part="harness")
    progress("harness", len(wanted), len(wanted))
    patched.runtime.close()
    return record.content
