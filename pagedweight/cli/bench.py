"""`pagedweight bench`: what this machine makes of a quantized model, at each width and batch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedweight.cli.common import device_option, fail, require_extras

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_STEPS = 3


def bench(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that quantize or save wrote.", file_okay=False)],
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once. Repeatable; 1 if left out.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to time.")] = 32,
    device: Annotated[str | None, typer.Option(help="Where to run; the GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time prompts and decode steps of a model with every linear-block at the same width, on random tokens.

    Medians, in eager mode: what transformers' own Python takes is in them.
    """
    require_extras("hf")
    import torch

    from pagedweight.cli.bars import bars
    from pagedweight.cli.loading import load_checked

    device = device_option(device)
    batches = batch or [1]
    try:
        with bars() as progress:
            model = load_checked(checkpoint, progress, device_map=device, dtype=dtype)
            longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            if longest is not None and prompt + steps + WARM_STEPS > longest:
                raise ValueError(f"--prompt {prompt} and --steps {steps} are more than the model's {longest} tokens")
            rows, widths = [], model.pagedweight.layout.widths
            for width in widths:
                with model.pagedweight.held_at(width):
                    for count in batches:
                        rows.append(_row(model, width, count, prompt, steps))
                        progress("width, batch", len(rows), len(widths) * len(batches))
    except (ValueError, OSError, RuntimeError) as error:
        raise fail(" ".join(str(error).split())) from error
    _print({"device": _name(device), "torch": torch.__version__, "prompt_tokens": prompt, "rows": rows}, as_json)


def _row(model: PreTrainedModel, width: int, count: int, prompt: int, steps: int) -> dict[str, float]:
    """One width and batch: milliseconds of the prompt and of a decode step."""
    import torch
    from transformers import DynamicCache

    from pagedweight.demo.evaluation import cache_argument

    held = model.pagedweight.snapshot().weight_bytes
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (count, prompt), device=model.device)
    one = ids[:, :1]
    with torch.inference_mode():
        model(ids)  # compiles what is not compiled yet
        cache = {cache_argument(model): DynamicCache(config=model.config)}
        prompt_ms = _timed(model, ids, cache)
        for _ in range(WARM_STEPS):
            model(one, **cache)
        decode_ms = sorted(_timed(model, one, cache) for _ in range(steps))[steps // 2]
    return {
        "bits": width,
        "batch": count,
        "weight_bytes": held,
        "prompt_ms": round(prompt_ms, 3),
        "decode_ms": round(decode_ms, 3),
        "decode_tokens_per_second": round(1e3 * count / decode_ms, 1),
    }


def _timed(model: PreTrainedModel, ids: Any, cache: dict[str, Any]) -> float:
    import torch

    began = time.perf_counter()
    model(ids, **cache)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def _name(device: str) -> str:
    import platform

    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "CPU"


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=f"{result['device']}, torch {result['torch']}", title_justify="left")
    for name in (
        "bits",
        "batch",
        "weights MiB",
        f"prompt of {result['prompt_tokens']}, ms",
        "decode step, ms",
        "tokens/s",
    ):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        times = (f"{row['prompt_ms']:.1f}", f"{row['decode_ms']:.2f}", f"{row['decode_tokens_per_second']:.1f}")
        table.add_row(str(row["bits"]), str(row["batch"]), f"{row['weight_bytes'] / 2**20:,.1f}", *times)
    Console(markup=False).print(table)
