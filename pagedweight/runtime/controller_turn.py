"""Turns between threads that use one runtime: who has waited longest comes next, and no interrupt ends one half-way."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from types import TracebackType

from pagedweight.runtime.interrupts import InterruptsHeld

_NOBODY, _HANDED_ON = 0, -1  # no thread has these numbers


class Turn:
    """A lock that its thread may take again. Unlike threading's, it is handed on: a thread that calls boundaries in a
    loop cannot keep others from pausing it.

    Interrupts that come meanwhile are raised at its end; while one waits for it, at once.
    """

    _interrupts: InterruptsHeld  # of the thread whose turn it is

    def __init__(self) -> None:
        self._queue: deque[threading.Lock] = deque()
        self._own = threading.Lock()
        self._owner = _NOBODY
        self._depth = 0

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._owner != thread:
            interrupts = InterruptsHeld()
            interrupts.__enter__()
            self._wait_for_it(thread, interrupts)
            self._interrupts = interrupts
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            interrupts = self._interrupts
            self._hand_on()
            interrupts.__exit__(kind, error, at)

    def _wait_for_it(self, thread: int, interrupts: InterruptsHeld) -> None:
        gate = threading.Lock()
        with self._own:
            if self._owner == _NOBODY:
                self._owner = thread
                return
            gate.acquire()
            self._queue.append(gate)
        with ExitStack() as on_interrupt:
            on_interrupt.push(interrupts)
            on_interrupt.callback(self._leave, gate)
            interrupts.wait_for(gate)
            on_interrupt.pop_all()
        self._owner = thread

    def _leave(self, gate: threading.Lock) -> None:
        """Interrupted while waiting, perhaps just when the turn had come."""
        with self._own:
            waiting = gate in self._queue
            if waiting:
                self._queue.remove(gate)
        if not waiting:
            self._hand_on()

    def _hand_on(self) -> None:
        with self._own:
            self._owner = _HANDED_ON if self._queue else _NOBODY
            if self._queue:
                self._queue.popleft().release()
