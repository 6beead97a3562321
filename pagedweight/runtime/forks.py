"""What a forked process does with its parent's GPU: nothing, not even at its end."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


class LeftInForks:
    """Holds CUDA's events, or host memory that the device copies into.

    PyTorch destroys both by asking the driver, which in a forked process answers with an error that no destructor may
    raise: the process is aborted while it ends. So whoever holds such things leaves them undestroyed there.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    def __del__(
        self,
        process: Callable[[], int] = os.getpid,  # not as names of this module, which a process that ends may clear
        forget: Callable = ctypes.pythonapi.Py_IncRef,
        as_object: Callable = ctypes.py_object,
    ) -> None:
        if process() != self._process:
            for held in vars(self).values():
                forget(as_object(held))
