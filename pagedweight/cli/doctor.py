"""`pagedweight doctor`: is what is installed here good together, and what should be changed."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from typing import Annotated

import typer

import pagedweight
from pagedweight.cli.common import require_extras
from pagedweight.cli.doctor_checks import BAD, GOOD, NOTE, Check, judge, look

STYLE = {GOOD: "green", NOTE: "yellow", BAD: "red"}
WRONG = "report it with this output: models answer wrongly here"
LARGEST_ERROR = 2e-2  # of fp16 logits, relative to the largest; fp32 on the CPU is compared with


def doctor(
    run: Annotated[
        bool, typer.Option("--run", help="Also run the model that ships, on the GPU if there is one, against the CPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check Python, torch, Triton, GPU, driver, transformers and vLLM; leaves with code 1 if something must change."""
    if run:
        require_extras("hf")
    checks = judge(look())
    if run:
        checks.append(_trial())
    if as_json:
        document = {"pagedweight": pagedweight.__version__, "checks": [check._asdict() for check in checks]}
        typer.echo(json.dumps(document))
    else:
        _print(checks)
    if any(check.state == BAD for check in checks):
        raise typer.Exit(1)


def _trial() -> Check:
    """One forward of the model that ships, on the GPU if there is one, against the torch twin on the CPU in fp32."""
    import torch

    from pagedweight.demo.run import CHECKPOINT, quiet_transformers

    began = time.monotonic()
    ids = torch.arange(5, 37)[None]

    def logits(device: str, dtype: torch.dtype) -> torch.Tensor:
        with quiet_transformers(), torch.no_grad():
            model = pagedweight.from_pretrained(CHECKPOINT, dtype=dtype, device_map=device)
            answer = model(ids.to(device)).logits.float().cpu()
        model.pagedweight.close()
        return answer

    expected = logits("cpu", torch.float32)
    if not torch.cuda.is_available():
        right = bool(torch.isfinite(expected).all())
        found = f"on {platform.machine()}: a forward in {time.monotonic() - began:.1f} s"
        return Check("trial", GOOD, found) if right else Check("trial", BAD, found, WRONG)
    error = float((logits("cuda", torch.float16) - expected).abs().max() / expected.abs().max())
    found = f"GPU and CPU differ by {error:.1e} of the largest logit, in {time.monotonic() - began:.1f} s"
    return Check("trial", GOOD, found) if error <= LARGEST_ERROR else Check("trial", BAD, found, WRONG)


def _print(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title=f"pagedweight {pagedweight.__version__}", title_justify="left")
    for column in ("", "", "found", "what to change"):
        table.add_column(column)
    for check in checks:
        table.add_row(Text(check.state, STYLE[check.state]), check.name, check.found, check.advice)
    console = Console(markup=False)  # an extra's brackets are none
    console.print(table)
    bad = sum(check.state == BAD for check in checks)
    console.print(f"{bad} to change before it works" if bad else "works together")
