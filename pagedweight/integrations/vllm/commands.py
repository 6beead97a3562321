"""What the engine tells every rank to do between two steps: plain arrays that travel with the step's own message."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_NONE = np.empty(0, dtype=np.int64)


class FrameSpots(NamedTuple):
    """Frames of pages and where they are: int64 (n,) each. A page is (row, plane), frame its frame's number in it;
    block is a KV block's id and position a frame's place in it."""

    row: np.ndarray = _NONE
    plane: np.ndarray = _NONE
    frame: np.ndarray = _NONE
    block: np.ndarray = _NONE
    position: np.ndarray = _NONE

    def __bool__(self) -> bool:
        return len(self.row) > 0


class FrameMoves(NamedTuple):
    """Frames that go from one spot to another on the device. frames: where they go; block, position: where from."""

    frames: FrameSpots = FrameSpots()
    block: np.ndarray = _NONE
    position: np.ndarray = _NONE


class Widths(NamedTuple):
    """Rows and their new committed widths, int64 (n,) each."""

    row: np.ndarray = _NONE
    bits: np.ndarray = _NONE


class Round(NamedTuple):
    """Widths that fall, then frames that are copied on the device to where others were; blocks are free after it."""

    lower: Widths = Widths()
    moves: FrameMoves = FrameMoves()


class Seating(NamedTuple):
    """Requests and their slots in the statistics. left: requests that have none any more; entered: requests that have
    one from now on, and which; cleared: slots whose statistics begin anew."""

    left: tuple[str, ...] = ()
    entered: tuple[tuple[str, int], ...] = ()
    cleared: tuple[int, ...] = ()


class StepCommands(NamedTuple):
    """Everything of one boundary, the same on every rank; carried out before the step's first kernel, in this order.

    raised: widths that rise now, whose frames have been loading since an earlier step. rounds: what falls and moves,
    one after another; what has just risen may fall again. loads: frames to load. seating: of the step's requests.
    """

    step: int = 0
    raised: Widths = Widths()
    rounds: tuple[Round, ...] = ()
    loads: FrameSpots = FrameSpots()
    seating: Seating = Seating()
