"""A turn is handed on in order, may be taken again by who has it, and survives an interrupt."""

import threading
import time

import pytest

from pagedweight.runtime.controller_turn import Turn


def test_turns_come_in_the_order_of_asking_and_one_at_a_time():
    turn, order, inside = Turn(), [], []

    def ask(number: int) -> None:
        with turn:
            inside.append(number)
            assert inside == [number]
            order.append(number)
            inside.remove(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    with turn:
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            while len(turn._queue) < waiting:
                time.sleep(1e-3)
        with turn:
            assert not order
        assert not order
    for thread in threads:
        thread.join(10)
    assert order == list(range(6))
    with turn:
        pass


@pytest.mark.parametrize("late", [False, True], ids=["still waiting", "when the turn had just come"])
def test_who_is_interrupted_while_waiting_passes_the_turn_on(monkeypatch, late):
    turn, gates = Turn(), []
    real = threading.Lock

    class Interrupted:
        """A gate at which the wait is broken off."""

        def __init__(self):
            self.lock = real()
            gates.append(self)

        def acquire(self):
            if self.lock.acquire(blocking=False):
                return
            if late:
                turn._queue.remove(self)
                turn._owner = -1
            raise KeyboardInterrupt

        def release(self):
            self.lock.release()

    with turn:
        owner = turn._owner
        turn._owner = owner + 1  # another thread's
        monkeypatch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turn.__enter__()
        monkeypatch.undo()
        assert len(gates) == 1
        assert not turn._queue
        assert turn._owner == (0 if late else owner + 1)
        turn._owner = owner
    with turn:
        pass
