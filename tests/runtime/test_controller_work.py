"""The planner's thread: what is asked of it, and what a forked process may expect of one that stayed behind."""

from __future__ import annotations

import os
import signal
import threading

from pagedweight.runtime.controller_work import PlanWorker


def works_without_its_thread(worker: PlanWorker) -> bool:
    """Whether an answer that will never come is given up, and the next question answered."""
    lost = worker.take("slow", wait=True)
    asked = worker.ask("next", lambda: lambda: 3)
    answer = worker.take("next", wait=True)
    worker.close()
    return lost is None and asked is None and answer == 3


def test_a_forked_process_does_not_wait_for_a_thread_that_stayed_behind() -> None:
    worker, go_on = PlanWorker(background=True), threading.Event()
    worker.ask("slow", lambda: lambda: go_on.wait(60))
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it
        os._exit(0 if works_without_its_thread(worker) else 1)
    go_on.set()
    assert worker.take("slow", wait=True) is True
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.close()
