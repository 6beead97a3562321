"""Ctrl-C at a chosen line or instruction of the package."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pagedweight

PACKAGE = str(Path(pagedweight.__file__).parent)


class Interrupts:
    """Counts what is executed in files of the package whose path holds one of `parts`, and interrupts there once.

    at: which line or, with instructions, which instruction; None only counts. struck: where it was, None before.
    signal_number: of the signal, Ctrl-C's by default.
    """

    def __init__(
        self,
        at: int | None,
        parts: tuple[str, ...],
        *,
        instructions: bool = False,
        signal_number: int = signal.SIGINT,
    ) -> None:
        self.seen = 0
        self.struck: tuple[str, int] | None = None
        self._at = at
        self._parts = parts
        self._instructions = instructions
        self._signal_number = signal_number

    @contextmanager
    def running(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object):
        path = frame.f_code.co_filename
        if not (path.startswith(PACKAGE) and any(part in path for part in self._parts)):
            return None
        frame.f_trace_opcodes = self._instructions
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object):
        if event == ("opcode" if self._instructions else "line"):
            self.seen += 1
            if self.seen == self._at:
                self.struck = Path(frame.f_code.co_filename).name, frame.f_lineno
                signal.raise_signal(self._signal_number)
        return self._step
