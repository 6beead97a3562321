"""Interrupts wait while things that belong together are changed: all of them are, or none."""

from __future__ import annotations

import _signal  # what `signal` wraps in look-ups of enums, which take ten times as long as the calls
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptsHeld:
    """What Ctrl-C would raise inside comes at the end; inside another one, at the end of that.

    Python calls signal handlers on the main thread alone, so on any other there is nothing to hold. Hold where
    something is changed, not where one only looks or waits. One that is left without its end holds nothing more: the
    handler of another signal has raised on the way in or out, or another thread has forked a process meanwhile.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._came = False
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler, frame = _signal.getsignal(_signal.SIGINT), sys._getframe(1)
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, InterruptsHeld):
            if owner._holds(frame):  # and raises what comes
                return
            handler, self._came = owner._handler, owner._came
        if not callable(handler):  # nothing of Python's is called
            return
        self._handler, self._frame = handler, frame
        try:
            _signal.signal(_signal.SIGINT, self._note)
        except ValueError:  # not Python's main thread, though it was the first to import `threading`
            self._handler = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is None:
            return
        if _signal.getsignal(_signal.SIGINT) == self._note:  # else somebody has put another in our place
            _signal.signal(_signal.SIGINT, self._handler)
        if self._came:
            self._handler(_signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds(frame):
            self._came = True
        else:
            _signal.signal(_signal.SIGINT, self._handler)
            self._handler(number, frame)

    def _holds(self, frame: FrameType | None) -> bool:
        """Whether what runs in the frame was called from where this was entered."""
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None
