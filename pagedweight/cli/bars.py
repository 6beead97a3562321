"""Progress bars of long commands, and the warnings that came up meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bars:
    """A bar for each step of a command; called with (step, done, total). Layers of one pass share a bar.

    total: None for a step whose length nobody knows, which shows that something is going on, and since when.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, int] = {}

    def __call__(self, step: str, done: int, total: int | None) -> None:
        name = "layer" if step.startswith("layer ") else step
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(step, total=total)
        self._progress.update(self._tasks[name], description=step, completed=done, total=total)

    def say(self, line: str) -> None:
        """A line on stderr, above the bars, and where none are drawn."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def bars() -> Iterator[Bars]:
    """Bars on stderr with counts, time taken and time left; none where stderr is no terminal."""
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    drawn = console.is_terminal
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not drawn)
    # One that draws nothing still ends with an empty line in older versions of rich.
    with progress if drawn else nullcontext():
        yield Bars(progress)


def read_lines(path: Path, progress: Bars) -> Iterator[str]:
    """A text file's lines, with a bar of its bytes. OSError when it cannot be read, ValueError when it is no text."""
    total, done = path.stat().st_size, 0
    with path.open("rb") as lines:
        for line in lines:
            done += len(line)
            progress("reading", done, total)
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"byte {done - len(line) + error.start} is no text; give another file") from error


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """The user warnings of a block, each once, for the command's summary."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield notes
    notes.extend(dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning)))
