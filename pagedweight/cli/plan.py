"""`pagedweight plan` and `pagedweight replay`: what the planner would do with a checkpoint, and did in a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedweight.cli.common import TRACE_FAULTS, fail, size_option, trace_fault

if TYPE_CHECKING:
    from pagedweight.cli.dry_run import Planned

FolderArgument = Annotated[Path, typer.Argument(help="Folder that quantize or save wrote.", file_okay=False)]


def plan(
    checkpoint: FolderArgument,
    free: Annotated[str, typer.Option(help="Bytes that expert weights should give up, such as 4GiB.")],
    weights: Annotated[
        str | None, typer.Option(help="Bytes they start from; without it every linear-block is at the parent width.")
    ] = None,
    most_damage: Annotated[float | None, typer.Option(help="Quality budget: predicted damage never exceeded.")] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Expert that keeps its bits, as LAYER.EXPERT=BITS.")] = None,
    explain_block: Annotated[
        str | None, typer.Option("--explain", help="Linear-block to explain, such as layers.3.experts.7.down.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every transition.")] = False,
) -> None:
    """Dry run: which linear-blocks would give up bits, and what that would cost. Nothing is loaded or moved."""
    from pagedweight.checkpoint import CheckpointError
    from pagedweight.cli.dry_run import dry_run, explained, parse_pin
    from pagedweight.runtime.config import RuntimeConfig

    free_bytes = size_option("--free", free)
    weight_bytes = None if weights is None else size_option("--weights", weights)
    try:
        config = RuntimeConfig(damage_limit=most_damage, pinned_experts=tuple(map(parse_pin, pin or ())))
        planned = dry_run(checkpoint, free_bytes, weight_bytes, config)
        told = None if explain_block is None else explained(planned, explain_block, free_bytes)
    except (CheckpointError, ValueError) as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(planned.document() | ({"explanation": told} if told else {})))
        return
    _print(planned, free_bytes)
    if told is not None:
        typer.echo(told)


def replay(
    trace: Annotated[Path, typer.Argument(help="File written with RuntimeConfig(trace_path=...).", dir_okay=False)],
    checkpoint: FolderArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a sentence.")] = False,
) -> None:
    """Plan every step of a trace again; leaves with code 1 when a plan differs from the recorded one."""
    from pagedweight.checkpoint import Checkpoint, CheckpointError
    from pagedweight.cli.bars import bars, read_lines
    from pagedweight.patching import policy_of
    from pagedweight.runtime.planner_trace import replay as replay_trace

    try:
        layout, policy = Checkpoint.open(checkpoint).layout, policy_of(checkpoint)
        policy.check_layout(layout)
    except (CheckpointError, ValueError) as error:
        raise fail(str(error)) from error
    try:
        with bars() as progress:
            steps = list(replay_trace(read_lines(trace, progress), policy))
    except TRACE_FAULTS as error:
        raise fail(f"{trace}: {trace_fault(error)}") from error
    differing = [step.step for step in steps if not step.same]
    moves = sum(len(step.recorded.transitions) for step in steps)
    if as_json:
        typer.echo(json.dumps({"planner_steps": len(steps), "moves": moves, "different_steps": differing}))
    else:
        typer.echo(f"{len(steps)} planner steps with {moves} moves; {len(steps) - len(differing)} replay bit for bit")
    if differing:
        typer.echo(f"different from step {differing[0]} on: {len(differing)} steps", err=True)
        raise typer.Exit(1)


def _print(planned: Planned, free_bytes: int) -> None:
    plan = planned.plan
    typer.echo(
        f"{planned.layout.rows} linear-blocks hold {planned.held_bytes} bytes; freeing {free_bytes} lowers "
        f"{len(plan.transitions)} of them, releases {plan.released_bytes} and adds predicted damage {plan.damage:.6g}"
    )
    if plan.shortfall_bytes:
        typer.echo(f"{plan.shortfall_bytes} bytes are missing: floors, pins or the quality budget allow no more")
    typer.echo("bits  before   after")
    for bits, (before, after) in planned.widths().items():
        typer.echo(f"{bits:>4} {before:>7} {after:>7}")
