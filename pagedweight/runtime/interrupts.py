"""Interrupts wait while things that belong together are changed: all of them are, or none."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class InterruptsHeld:
    """What Ctrl-C would raise inside comes at the end. May be nested; what came inside goes to the outer one.

    Python calls signal handlers on the main thread alone, so on any other there is nothing to hold.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._came = False
        self._waiting = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # else nothing of Python's is called
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is None:
            return
        if signal.getsignal(signal.SIGINT) == self._note:  # else somebody has put another in our place
            signal.signal(signal.SIGINT, self._handler)
        if self._came:
            self._came = False
            self._handler(signal.SIGINT, None)

    def wait_for(self, lock: threading.Lock) -> None:
        """Acquire the lock; meanwhile an interrupt comes at once."""
        self._waiting = True
        try:
            if self._came:
                self._deliver()
            lock.acquire()
        finally:
            self._waiting = False

    def _note(self, number: int, frame: object) -> None:
        self._came = True
        if self._waiting:
            self._deliver()

    def _deliver(self) -> None:
        self._came = self._waiting = False
        self._handler(signal.SIGINT, None)
        self._waiting = True
