"""Interrupts wait while things that belong together are changed: all of them are, or none."""

from __future__ import annotations

import _signal  # what `signal` wraps in look-ups of enums, which take ten times as long as the calls
import threading
from types import TracebackType
from typing import Any


class InterruptsHeld:
    """What Ctrl-C would raise inside comes at the end; inside another one, at the end of that.

    Python calls signal handlers on the main thread alone, so on any other there is nothing to hold. Hold where
    something is changed, not where one only looks or waits.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._came = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = _signal.getsignal(_signal.SIGINT)
        # Not callable: nothing of Python's is called. Another's: its owner raises what comes.
        if callable(handler) and not isinstance(getattr(handler, "__self__", None), InterruptsHeld):
            self._handler = handler
            _signal.signal(_signal.SIGINT, self._note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is None:
            return
        if _signal.getsignal(_signal.SIGINT) == self._note:  # else somebody has put another in our place
            _signal.signal(_signal.SIGINT, self._handler)
        if self._came:
            self._handler(_signal.SIGINT, None)

    def _note(self, number: int, frame: object) -> None:
        self._came = True
