"""What a forked process leaves alone at its end."""

from __future__ import annotations

import os
import sys

from pagedweight.runtime import forks
from pagedweight.runtime.forks import LeftInForks


class Aborts:
    """Like PyTorch's events: whoever destroys it in a forked process does not come to an ordinary end."""

    def __init__(self, destroyed: list[str]) -> None:
        self._process, self._destroyed = os.getpid(), destroyed

    def __del__(self) -> None:
        if os.getpid() != self._process:
            os._exit(6)
        self._destroyed.append("here")


class Holder(LeftInForks):
    def __init__(self, *held: Aborts) -> None:
        super().__init__()
        self.first, self.others = held[0], held[1:]


def ends_of_a_fork(hold) -> int:
    child = os.fork()
    if not child:
        for name in ("os", "ctypes"):  # as a process that ends may do
            setattr(forks, name, None)
        sys.unraisablehook = lambda _: os._exit(7)
        hold.clear()  # what holds them goes, as all does while a process ends
        os._exit(8)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_only_the_process_that_made_them_destroys_events_and_memory() -> None:
    destroyed: list[str] = []
    held = [Holder(Aborts(destroyed), Aborts(destroyed))]
    assert ends_of_a_fork(held) == 8
    assert destroyed == []
    held.clear()
    assert destroyed == ["here", "here"]
    unprotected = [Aborts(destroyed)]
    assert ends_of_a_fork(unprotected) == 6
