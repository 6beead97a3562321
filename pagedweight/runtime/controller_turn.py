"""Turns between threads that use one runtime: a boundary lets others go first, and no interrupt leaves a turn taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_LONGEST_WAIT_SECONDS, _LOOK_SECONDS = 5e-3, 5e-5

Method = TypeVar("Method", bound=Callable[..., Any])


class Turn:
    """A lock that its thread may take again, and who asks for it.

    lock: entered by `with`, which no interrupt divides, as it would an `__enter__` written in Python.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._asking: set[int] = set()

    def ask(self) -> None:
        """This thread is about to enter the lock."""
        self._asking.add(threading.get_ident())

    def served(self) -> None:
        """It has entered."""
        self._asking.discard(threading.get_ident())

    def after_others(self) -> None:
        """Wait until those that ask have been served: a thread that calls boundaries in a loop would have the lock
        again before another has woken up. Who was interrupted while it waited is waited for no longer than that."""
        if not self._asking:
            return
        self.served()
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        while self._asking and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)


def in_turn(method: Method) -> Method:
    """A method that has its object's `_turn` while it runs."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        turn: Turn = self._turn
        try:
            turn.ask()
            with turn.lock:
                turn.served()
                return method(self, *args, **kwargs)
        finally:
            turn.served()  # also when an interrupt has ended the wait: every boundary would wait for this thread

    return call
