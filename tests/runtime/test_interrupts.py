"""Ctrl-C at any instruction of a turn and any line of a boundary: nothing is lost, and the next boundary goes on."""

import signal
import threading
from contextlib import suppress

import numpy as np
import pytest

from pagedweight.runtime.config import RuntimeConfig
from pagedweight.runtime.controller_turn import Turn
from pagedweight.runtime.interrupts import InterruptsHeld
from tests.interrupting import Interrupts
from tests.runtime.support import FRAME_BYTES, assert_published, tiny_model, tiny_runtime

TURN = ("controller_turn.py", "interrupts.py")
BLOCK_FRAMES = 4
MOST_LINES = 700  # of a boundary that moves rows


def interrupted(turn: Turn, at: int | None) -> tuple[Interrupts, list[str]]:
    """A turn that is interrupted at one of its instructions, and what of its inside was done."""
    done, interrupts = [], Interrupts(at, TURN, instructions=True)
    with suppress(KeyboardInterrupt), interrupts.running(), turn:
        done.append("first")
        with turn:
            done.append("second")
        done.append("third")
    return interrupts, done


def assert_free(turn: Turn) -> None:
    taken = threading.Event()

    def take() -> None:
        with turn:
            taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert taken.wait(10), "nobody can have the turn"
    thread.join(10)


def test_an_interrupt_at_any_instruction_of_a_turn_comes_before_it_or_after_all_of_it():
    handler, turn = signal.getsignal(signal.SIGINT), Turn()
    whole, _ = interrupted(turn, None)
    assert whole.seen > 100
    for at in range(1, whole.seen + 1):
        interrupts, done = interrupted(turn, at)
        assert interrupts.struck
        assert done in ([], ["first", "second", "third"]), interrupts.struck
        assert signal.getsignal(signal.SIGINT) is handler, interrupts.struck
    assert_free(turn)


def test_an_interrupt_at_any_instruction_of_waiting_leaves_a_turn_that_others_can_have():
    turn, at, ends = Turn(), 0, []
    while not ends or ends[-1]:
        at += 1
        inside, leave = threading.Event(), threading.Event()

        def hold(inside: threading.Event = inside, leave: threading.Event = leave) -> None:
            with turn:
                inside.set()
                leave.wait(0.005)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        interrupts = Interrupts(at, TURN, instructions=True)
        with suppress(KeyboardInterrupt), interrupts.running(), turn:
            pass
        leave.set()
        thread.join(10)
        assert_free(turn)
        ends.append(interrupts.struck)
    assert len(ends) > 100


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


def test_who_waits_is_interrupted_at_once():
    turn, inside, leave = Turn(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), turn:
        pytest.fail("the turn is another thread's")
    leave.set()
    thread.join(10)
    timer.join(10)
    assert_free(turn)


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


def test_an_interrupt_at_any_line_of_a_boundary_leaves_table_and_device_agreeing():
    """Weights fall under pressure and come back, and each boundary is interrupted at one of its lines, or after it."""
    model, rng = tiny_model(), np.random.default_rng(0)
    config = RuntimeConfig(offload_free_blocks=2, reload_free_blocks=6, min_dwell_steps=1)
    frames, struck = model.resident_frames(6) + 10 * BLOCK_FRAMES, set()
    for _ in range(40):
        runtime = tiny_runtime(model, frames, config, block_frames=BLOCK_FRAMES)
        kv = [runtime.allocate_kv(BLOCK_FRAMES * count) for count in (4, 5)]
        for step in range(8):
            if step == 3:
                runtime.arena.free(np.concatenate(kv))
            interrupts = Interrupts(int(MOST_LINES ** rng.random()), ("runtime/",))
            with suppress(KeyboardInterrupt), interrupts.running():
                runtime.boundary(pending_blocks=2 if step < 3 else 0)
            struck.add(interrupts.struck)
            runtime.check()
            assert runtime.snapshot().kv_bytes == (step < 3) * 9 * BLOCK_FRAMES * FRAME_BYTES
            assert_published(model, runtime.tables, runtime.arena)
            assert step != 2 or runtime.snapshot().mean_bits < 6
        for _ in range(20):
            runtime.boundary()
        assert (runtime.snapshot().bits == 6).all()
    assert len(struck) > 100
