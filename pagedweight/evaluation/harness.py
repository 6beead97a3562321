"""A patched model under lm-evaluation-harness, with whatever tasks that can load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    limit: int | None = None,
    rows: int = 1,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Scores by task and metric, as the harness names them, at the widths that the model has now.

    folder: of task files beside the harness's own. limit: items of a task. rows: items per forward. ValueError for a
    task that is not known.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm-evaluation-harness knows no task {unknown[0]!r}; give --harness-folder for task files")
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=rows)
    found = lm_eval.simple_evaluate(
        model=wrapped,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=0,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        verbosity="ERROR",
    )
    return {task: _plain(scores) for task, scores in found["results"].items()}


def _plain(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scores.items() if isinstance(value, int | float | str)}
