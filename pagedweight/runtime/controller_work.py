"""Planner calls beside the forwards: one at a time on a thread of its own, asked for now and used when it is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Answer = TypeVar("Answer")


class PlanWorker:
    """Pure calls and what they are for. background is False for a worker that answers at once, on the caller's thread.

    A key says what an answer depends on: an answer to another question than the one asked now is dropped.
    """

    def __init__(self, *, background: bool) -> None:
        self.background = background
        self._threads: ThreadPoolExecutor | None = None
        self._coming: tuple[Hashable, Future] | None = None
        self._process = os.getpid()

    def ask(self, key: Hashable, prepare: Callable[[], Callable[[], Answer]]) -> Answer | None:
        """The answer when it is there, else None, and the call is under way unless another one is.

        prepare: gathers the call's arguments on this thread; not called while an answer is awaited.
        """
        if not self.background:
            return prepare()()
        answer = self.take(key)  # which has looked whose threads these are
        if answer is None and self._coming is None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, thread_name_prefix="pagedweight-planner")
            self._coming = key, self._threads.submit(prepare())
        return answer

    def take(self, key: Hashable, *, wait: bool = False) -> Answer | None:
        """The answer to an earlier question, None when there is none yet; wait: for one that is under way."""
        if self._process != os.getpid():
            self._forget()
        if self._coming is None:
            return None
        asked, future = self._coming
        if not (future.done() or (wait and asked == key)):
            return None
        self._coming = None
        answer = future.result()
        return answer if asked == key else None

    def close(self) -> None:
        """End the thread; what it is working on is finished first."""
        if self._process != os.getpid():
            self._forget()
        if self._threads is not None:
            self._threads.shutdown()
        self._coming = None

    def _forget(self) -> None:
        """In a forked process: the thread stayed behind, and what it was working on will never be done here."""
        self._threads = self._coming = None
        self._process = os.getpid()
