"""`pagedweight top`: a server's memory and widths, live."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedweight.cli.common import fail, require_extras

if TYPE_CHECKING:
    from pagedweight.cli.top_reading import Reading

ANSWER_SECONDS = 10.0
PICTURE_COLUMNS = 100


def top(
    address: Annotated[
        str, typer.Argument(help="A server, of pagedweight serve or of vLLM.")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    readings: Annotated[int, typer.Option(min=0, help="Leave after so many readings; 0 goes on until Ctrl-C.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Keep the last screen here, as .svg.", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reading as a line of JSON instead.")] = False,
) -> None:
    """Watch a running server: KV and weight bytes, bits layer by layer, moves and stalls, from its /metrics."""
    require_extras("serve")
    if not _is_address(address):
        raise fail(f"{address} is no address; write http://HOST:PORT")
    if picture is not None and picture.suffix != ".svg":
        raise fail(f"--picture {picture}: name a file that ends in .svg")
    try:
        first = read(address)
    except (OSError, ValueError) as error:
        raise fail(f"{address}: {_reason(error)}") from error
    seen = _readings(address, first, interval, readings)
    if as_json:
        _print(address, seen)
    elif picture is not None:
        _draw(address, seen, picture)
    else:
        _show(address, seen)


def _is_address(text: str) -> bool:
    try:
        parts = urllib.parse.urlparse(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # no port, or brackets that do not close
        return False


def read(address: str) -> Reading:
    """One reading now. OSError when nobody answers, ValueError when what answers has no paged experts."""
    from pagedweight.cli.top_reading import parse

    with urllib.request.urlopen(f"{address.rstrip('/')}/metrics", timeout=ANSWER_SECONDS) as answer:
        text = answer.read().decode()
    return parse(text, time.monotonic())


def _readings(address: str, first: Reading, interval: float, count: int) -> Iterator[Reading | str]:
    """The first reading and `count` in all, or for ever; where there is none, why."""
    yield first
    done = 1
    while done != count:
        time.sleep(interval)
        try:
            yield read(address)
        except (OSError, ValueError) as error:
            yield _reason(error)
        done += 1


def _print(address: str, readings: Iterable[Reading | str]) -> None:
    for reading in readings:
        if isinstance(reading, str):
            raise fail(f"{address}: {reading}")
        typer.echo(json.dumps(reading._asdict()))


def _show(address: str, readings: Iterable[Reading | str]) -> None:
    """The live screen, and what it showed last at the end or at Ctrl-C. A server that does not answer is waited for; it
    says so."""
    from rich.console import Console
    from rich.live import Live

    from pagedweight.cli.top_view import View

    console = Console()
    view = View(address, console)
    try:
        with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            for reading in readings:
                view.add(reading)
                if live is not None:
                    live.update(view.render(), refresh=True)
    finally:
        console.print(view.render())


def _draw(address: str, readings: Iterable[Reading | str], picture: Path) -> None:
    """The screen after the last reading, or at Ctrl-C, as a picture."""
    from rich.console import Console

    from pagedweight.cli.heat import save_picture
    from pagedweight.cli.top_view import View

    console = Console(
        record=True, width=PICTURE_COLUMNS, force_terminal=True, color_system="truecolor", file=StringIO()
    )
    view = View(address, console)
    try:
        for reading in readings:
            view.add(reading)
    finally:
        console.print(view.render())
        try:
            save_picture(console, picture, "pagedweight top")
        except OSError as error:
            raise fail(f"--picture {picture}: {error.strerror}") from error
    typer.echo(str(picture))


def _reason(error: Exception) -> str:
    return str(error.reason if type(error) is urllib.error.URLError else error)
