"""Ctrl-C at any instruction of a turn and any line of a boundary: nothing is lost, and the next boundary goes on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from pagedweight.runtime import interrupts as interrupts_module
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_turn import Turn, in_turn
from pagedweight.runtime.interrupts import InterruptsHeld
from tests.interrupting import Interrupts
from tests.runtime.support import FRAME_BYTES, assert_published, tiny_model, tiny_runtime

TURN = ("controller_turn.py", "interrupts.py")
BLOCK_FRAMES = 4


class Held:
    """A turn, and what was done in it."""

    def __init__(self) -> None:
        self._turn = Turn()
        self.done: list[str] = []

    @in_turn
    def enter(self) -> None:
        self.done.append("entered")
        with InterruptsHeld():
            self.done.append("changed")
            self.done.append("whole")


def interrupted(held: Held, after_seconds: float) -> bool:
    """Whether a call that is interrupted so soon after its beginning was: CPython looks for signals at a few of its
    instructions, and not where a `with` enters or leaves a lock of its own."""
    held.done.clear()
    try:
        signal.setitimer(signal.ITIMER_REAL, after_seconds)
        held.enter()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


@pytest.fixture
def _alarm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def assert_free(held: Held) -> None:
    thread = threading.Thread(target=held.enter)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "nobody can have the turn"


@pytest.mark.usefixtures("_alarm_interrupts")
def test_an_interrupt_at_any_time_gives_the_turn_back_and_divides_no_change():
    handler, held, rng, ends = signal.getsignal(signal.SIGINT), Held(), np.random.default_rng(0), []
    for number in range(3000):
        came = interrupted(held, rng.uniform(1e-6, 120e-6))
        ends.append((came, *held.done))
        assert ("changed" in held.done) == ("whole" in held.done)
        assert signal.getsignal(signal.SIGINT) is handler
        if came and number % 10 == 0:
            assert_free(held)
    assert len(set(ends)) > 2, set(ends)
    assert_free(held)


def test_who_waits_is_interrupted_at_once():
    held, inside, leave = Held(), threading.Event(), threading.Event()

    def hold() -> None:
        with held._turn.lock:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        held.enter()
    assert not held.done
    assert not held._turn._asking, "each boundary of the others would wait for this thread first"
    leave.set()
    thread.join(10)
    timer.join(10)
    assert_free(held)


def test_an_interrupt_at_any_line_of_pausing_leaves_nothing_paused():
    model = tiny_model()
    runtime = tiny_runtime(model, model.resident_frames(6) + 40)
    whole = Interrupts(None, ("controller.py", *TURN))
    with whole.running(), runtime.paused():
        pass
    for at in range(1, whole.seen + 1):
        interrupts, inside = Interrupts(at, ("controller.py", *TURN)), []
        with suppress(KeyboardInterrupt), interrupts.running(), runtime.paused():
            inside.append(runtime._pauses)
        assert interrupts.struck
        assert inside in ([], [1])
        assert runtime._pauses == 0, interrupts.struck


def test_what_came_inside_goes_to_the_outer_one_and_is_raised_at_its_end():
    done = []

    def interrupted_inside() -> None:
        with InterruptsHeld():
            with InterruptsHeld():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        interrupted_inside()
    assert done == ["inner", "outer"]


def test_a_handler_that_is_put_in_our_place_stays():
    def own(number, frame):
        raise AssertionError("nobody interrupts")

    before = signal.getsignal(signal.SIGINT)
    try:
        with InterruptsHeld():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_without_signals_and_a_process_that_ignores_them_hold_nothing():
    before, seen = signal.getsignal(signal.SIGINT), []

    def look() -> None:
        with InterruptsHeld():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    assert seen == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptsHeld():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def raised_by_an_interrupt() -> bool:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


def test_a_timeout_at_any_instruction_on_the_way_in_or_out_loses_no_later_interrupt():
    """The handler of another signal, which is not held, raises where `with` calls nothing to put Ctrl-C's back."""

    def expire(number, frame):
        raise TimeoutError

    held, before = Held(), (signal.getsignal(signal.SIGINT), signal.signal(signal.SIGALRM, expire))
    where, left = ("interrupts.py",), 0
    try:
        whole = Interrupts(None, where, instructions=True)
        with whole.running():
            held.enter()
        for at in range(1, whole.seen + 1):
            struck = Interrupts(at, where, instructions=True, signal_number=signal.SIGALRM)
            with suppress(TimeoutError), struck.running():
                held.enter()
            left += signal.getsignal(signal.SIGINT) is not before[0]
            if at % 2:
                assert raised_by_an_interrupt(), struck.struck
            held.enter()  # a later one puts the handler back as well
            assert signal.getsignal(signal.SIGINT) is before[0], struck.struck
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGALRM, before[1])
    assert left > 5


def test_what_came_before_such_a_timeout_is_raised_by_the_next():
    outer = InterruptsHeld()

    def left_inside() -> None:
        outer.__enter__()
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    left_inside()
    with pytest.raises(KeyboardInterrupt), InterruptsHeld():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_a_child_that_another_thread_forks_meanwhile_is_interrupted_at_once():
    ends = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(7 if raised_by_an_interrupt() else 8)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with InterruptsHeld():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(10)
    assert ends == [7]


def test_a_host_whose_first_import_of_threading_is_on_another_thread_has_nothing_held():
    """Python's main thread may be a host program's: `threading` takes the one that imports it for that."""
    program = f"""
import _thread, sys, time
assert "threading" not in sys.modules
ends = []
def run():
    try:
        sys.path.insert(0, {str(Path(interrupts_module.__file__).parent)!r})
        import interrupts
        with interrupts.InterruptsHeld():
            ends.append("inside")
    finally:
        ends.append("over")
_thread.start_new_thread(run, ())
while "over" not in ends:
    time.sleep(1e-3)
print(ends[0])
"""
    ran = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "inside\n", ran.stderr


def test_an_interrupt_at_any_line_of_a_boundary_leaves_table_and_device_agreeing():
    """Weights fall under pressure and come back; each of these boundaries is interrupted at one of its lines."""
    model, rng = tiny_model(), np.random.default_rng(0)
    config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=1)
    frames, struck, lowered = model.resident_frames(6) + 10 * BLOCK_FRAMES, set(), 0
    for _ in range(40):
        runtime = tiny_runtime(model, frames, config, block_frames=BLOCK_FRAMES)
        kv = [runtime.allocate_kv(BLOCK_FRAMES * count) for count in (4, 5)]
        for step in range(8):
            if step == 3:
                runtime.arena.free(np.concatenate(kv))
            interrupts = Interrupts(int(20 * 80 ** rng.random()), ("runtime/",))
            with suppress(KeyboardInterrupt), interrupts.running():
                runtime.boundary(pending_blocks=2 if step < 3 else 0)
            struck.add(interrupts.struck)
            runtime.check()
            assert runtime.snapshot().kv_bytes == (step < 3) * 9 * BLOCK_FRAMES * FRAME_BYTES
            assert_published(model, runtime.tables, runtime.arena)
            lowered += runtime.snapshot().moves.lowered_rows
        for _ in range(20):
            runtime.boundary()
        assert (runtime.snapshot().bits == 6).all()
    assert len(struck) > 100
    assert lowered > 100
