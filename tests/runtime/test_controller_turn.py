"""A turn is one thread's at a time, which may take it again; who asks for it comes before the next boundary."""

import threading
import time

import pytest

from pagedweight.runtime.controller_turn import Turn, in_turn


class Held:
    """Has a turn, and says who was inside at once."""

    def __init__(self) -> None:
        self._turn = Turn()
        self.inside: list[int] = []
        self.done = 0

    @in_turn
    def enter(self, depth: int = 1) -> str:
        self.inside.append(depth)
        assert len(set(self.inside)) == len(self.inside), self.inside
        if depth:
            time.sleep(1e-4)
            self.enter(depth - 1)
        self.inside.remove(depth)
        self.done += 1
        return "done"

    @in_turn
    def fail(self) -> None:
        raise ValueError("inside")


def test_one_thread_at_a_time_which_may_take_its_turn_again():
    held = Held()
    threads = [threading.Thread(target=held.enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert held.done == 16
    assert held.enter() == "done"


def test_an_error_inside_gives_the_turn_back():
    held = Held()
    with pytest.raises(ValueError, match="inside"):
        held.fail()
    thread = threading.Thread(target=held.enter)
    thread.start()
    thread.join(10)
    assert held.done == 2


def test_who_asks_comes_before_a_thread_that_has_just_had_it():
    turn, order = Turn(), []

    def ask() -> None:
        turn.ask()
        with turn.lock:
            turn.served()
            order.append("asked")

    thread = threading.Thread(target=ask)
    with turn.lock:
        thread.start()
        while not turn._asking:
            time.sleep(1e-4)
    turn.after_others()
    with turn.lock:
        order.append("again")
    thread.join(10)
    assert order == ["asked", "again"]


def test_who_asked_and_never_came_is_waited_for_a_little_while():
    turn = Turn()
    turn._asking.add(-1)
    began = time.monotonic()
    turn.after_others()
    assert 4e-3 < time.monotonic() - began < 2
    turn._asking.clear()
    turn.ask()  # by this thread, whose wait an interrupt has ended
    turn.after_others()
    assert not turn._asking
